//! Consuming a queue of RabbitMQ, and hearing broadcasts. What a consumer had taken when its connection was lost is
//! given to others by the broker at once.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt as _;

use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Acker, Channel, ExchangeKind};
use tokio::time::Instant;

use super::{Inner, message};
use crate::bus::{BusError, Consumer, Delivery, Listener, Message, Settle, Subscription, dead_letter, in_time};
use crate::held::Held;
use crate::opening::Opening;

/// How many broadcasts wait for a listener that is slow; older ones go.
const MOST_BROADCASTS: i32 = 10_000;

pub(super) struct Taking {
    rabbit: Arc<Inner>,
    what: Subscription,
    /// `None` after it was lost. The channel ends with it.
    open: Option<Open>,
    opening: Opening<Open>,
    held: Held<Taken>,
}

/// A message under way. Dropped, the broker gives it to others when the channel ends.
struct Taken {
    rabbit: Arc<Inner>,
    what: Subscription,
    held: Held<Taken>,
    message: Message,
    acker: Acker,
}

type Open = (Channel, lapin::Consumer);

impl Taking {
    pub(super) async fn open(rabbit: &Arc<Inner>, what: &Subscription) -> Result<Self, BusError> {
        let open = Some(consume(Arc::clone(rabbit), what.clone()).await?);
        let (rabbit, what) = (Arc::clone(rabbit), what.clone());
        Ok(Self { rabbit, what, open, opening: Opening::new(), held: Held::new() })
    }
}

/// Makes the queue of a group, if it is not there, and begins to consume it.
async fn consume(rabbit: Arc<Inner>, what: Subscription) -> Result<Open, BusError> {
    let link = rabbit.link().await?;
    let opened = async {
        let error = |error| rabbit.error(&error);
        let queue = rabbit.make_group(&link, &what).await?;
        let channel = link.connection.create_channel().await.map_err(error)?;
        let most = u16::try_from(what.in_flight).unwrap_or(u16::MAX).max(1);
        channel.basic_qos(most, BasicQosOptions::default()).await.map_err(error)?;
        let (queue, options) = (rabbit.short(&queue)?, BasicConsumeOptions::default());
        let consumer = channel.basic_consume(queue, "".into(), options, FieldTable::default());
        let consumer = consumer.await.map_err(error)?;
        Ok((channel, consumer))
    };
    in_time(&rabbit.name, "opening the consumer", opened).await
}

impl Drop for Taking {
    fn drop(&mut self) {
        self.held.close();
        if let Some((channel, _)) = self.open.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            // What was taken and not settled goes back to the queue now, not when the connection ends.
            runtime.spawn(async move {
                let _ = channel.close(200, "done".into()).await;
            });
        }
    }
}

#[async_trait]
impl Consumer for Taking {
    async fn next(&mut self) -> Result<Delivery, BusError> {
        let (_, consumer) = match &mut self.open {
            Some(open) => open,
            None => {
                // Their channel is gone: the broker gives them again.
                self.held.clear();
                let (rabbit, what) = (Arc::clone(&self.rabbit), self.what.clone());
                self.open.insert(self.opening.wait(&self.rabbit.name, || consume(rabbit, what)).await?)
            }
        };
        let fresh = tokio::select! {
            biased;
            taken = self.held.due() => return Ok(taken.into_delivery()),
            fresh = consumer.next() => fresh,
        };
        match fresh {
            Some(Ok(fresh)) => {
                let message = message(&fresh.properties, fresh.data);
                let (rabbit, what, held) = (Arc::clone(&self.rabbit), self.what.clone(), self.held.clone());
                Ok(Taken { rabbit, what, held, message, acker: fresh.acker }.into_delivery())
            }
            Some(Err(error)) => {
                self.open = None;
                Err(self.rabbit.error(&error))
            }
            None => {
                self.open = None;
                Err(lost(&self.rabbit))
            }
        }
    }
}

fn lost(rabbit: &Inner) -> BusError {
    BusError::Unreachable { bus: rabbit.name.clone(), why: "the connection was lost".to_owned() }
}

impl Taken {
    fn into_delivery(self) -> Delivery {
        Delivery::new(self.message.clone(), None, self)
    }
}

#[async_trait]
impl Settle for Taken {
    async fn ack(self: Box<Self>) -> Result<(), BusError> {
        let acked = self.acker.ack(BasicAckOptions::default());
        in_time(&self.rabbit.name, "acknowledging", async {
            acked.await.map(drop).map_err(|error| self.rabbit.error(&error))
        })
        .await
    }

    async fn reject(self: Box<Self>, reason: &str) -> Result<(), BusError> {
        let dead = dead_letter(&self.what.topic, &self.message, reason);
        if let Err(not) = self.rabbit.publish(&[dead]).await {
            self.dropped();
            return Err(not.error);
        }
        self.ack().await
    }

    async fn redeliver(self: Box<Self>, after: Duration) -> Result<(), BusError> {
        if !self.acker.usable() {
            return Err(lost(&self.rabbit));
        }
        let held = self.held.clone();
        if after.is_zero() {
            let back = self.acker.nack(BasicNackOptions { requeue: true, ..BasicNackOptions::default() });
            return back.await.map(drop).map_err(|error| self.rabbit.error(&error));
        }
        held.put(Instant::now() + self.what.put_off(after), *self);
        Ok(())
    }

    /// The broker would wait for the end of the channel.
    fn dropped(self: Box<Self>) {
        let held = self.held.clone();
        held.put(Instant::now() + self.what.put_off(self.what.ack_wait), *self);
    }
}

pub(super) struct Hearing {
    rabbit: Arc<Inner>,
    name: String,
    open: Option<Open>,
    opening: Opening<Open>,
}

impl Hearing {
    pub(super) async fn open(rabbit: &Arc<Inner>, name: &str) -> Result<Self, BusError> {
        let open = Some(hear(Arc::clone(rabbit), name.to_owned()).await?);
        Ok(Self { rabbit: Arc::clone(rabbit), name: name.to_owned(), open, opening: Opening::new() })
    }
}

/// Binds a queue of its own to the exchange of a channel, and begins to consume it.
async fn hear(rabbit: Arc<Inner>, name: String) -> Result<Open, BusError> {
    let link = rabbit.link().await?;
    let opened = async {
        let error = |error| rabbit.error(&error);
        rabbit.make_exchange(&link, &name, ExchangeKind::Fanout, false).await?;
        let channel = link.connection.create_channel().await.map_err(error)?;
        let mut arguments = FieldTable::default();
        arguments.insert("x-max-length".into(), AMQPValue::LongInt(MOST_BROADCASTS));
        let options = QueueDeclareOptions { exclusive: true, auto_delete: true, ..QueueDeclareOptions::default() };
        let queue = channel.queue_declare("".into(), options, arguments).await.map_err(error)?;
        let queue = queue.name().clone();
        let (exchange, options) = (rabbit.short(&name)?, QueueBindOptions::default());
        let bound = channel.queue_bind(queue.clone(), exchange, "".into(), options, FieldTable::default());
        bound.await.map_err(error)?;
        let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
        let consumer = channel.basic_consume(queue, "".into(), options, FieldTable::default());
        let consumer = consumer.await.map_err(error)?;
        Ok((channel, consumer))
    };
    in_time(&rabbit.name, "listening", opened).await
}

#[async_trait]
impl Listener for Hearing {
    async fn next(&mut self) -> Result<Bytes, BusError> {
        let (_, consumer) = match &mut self.open {
            Some(open) => open,
            None => {
                let (rabbit, name) = (Arc::clone(&self.rabbit), self.name.clone());
                self.open.insert(self.opening.wait(&self.rabbit.name, || hear(rabbit, name)).await?)
            }
        };
        let heard = consumer.next().await;
        match heard {
            Some(Ok(heard)) => Ok(heard.data.into()),
            Some(Err(error)) => {
                self.open = None;
                Err(self.rabbit.error(&error))
            }
            None => {
                self.open = None;
                Err(lost(&self.rabbit))
            }
        }
    }
}
