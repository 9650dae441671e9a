//! What every lock service must do, on the real ones.

mod locks_bed;

use std::sync::Arc;
use std::time::{Duration, Instant};

use locks_bed::{Kind, TTL, connect, until};
use longhaul::lock::{LockClaim, LockService, Take};
use uuid::Uuid;

/// A service, and a lock of it.
struct Bed {
    kind: Kind,
    url: String,
    service: Arc<dyn LockService>,
}

const NAME: &str = "locks/default/db";

fn by(owner: &str) -> LockClaim<'_> {
    LockClaim { name: NAME, owner, token: None, ttl: TTL }
}

impl Bed {
    async fn of(kind: Kind) -> Option<Self> {
        let url = kind.url()?;
        Some(Self { kind, service: connect(&url).await, url })
    }

    async fn take(&self, owner: &str) -> Take {
        self.service.take(&by(owner)).await.expect("the service answers")
    }

    async fn keep(&self, owner: &str) -> bool {
        self.service.keep(&by(owner)).await.expect("the service answers")
    }

    async fn release(&self, owner: &str) {
        self.service.release(&by(owner)).await.expect("the service answers");
    }

    /// The lock's name there, for others.
    fn raw_name(&self) -> String {
        let prefix = self.url.split("prefix=").nth(1).expect("there is one");
        format!("{prefix}/{NAME}")
    }
}

macro_rules! on_every_service {
    ($($test:ident),+ $(,)?) => {
        mod redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                if let Some(bed) = super::Bed::of(super::Kind::Redis).await {
                    super::$test(bed).await;
                }
            })+
        }
        mod etcd {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                if let Some(bed) = super::Bed::of(super::Kind::Etcd).await {
                    super::$test(bed).await;
                }
            })+
        }
    };
}

on_every_service!(
    one_owner_has_it_until_it_gives_it_back,
    only_its_owner_can_keep_it_or_give_it_back,
    who_does_not_keep_it_loses_it_and_who_does_has_it,
    those_who_wait_are_served_in_the_order_in_which_they_came,
    who_waits_and_falls_silent_does_not_keep_others_waiting,
    a_token_must_be_larger_than_every_one_before,
    any_process_can_go_on_for_an_owner,
    many_at_once_never_have_it_together,
    other_programs_take_part,
    what_is_wrong_with_a_url_or_a_login_is_said_without_the_secret,
);

async fn one_owner_has_it_until_it_gives_it_back(bed: Bed) {
    assert_eq!(bed.take("one").await, Take::Taken);
    assert_eq!(bed.take("two").await, Take::Busy);
    assert_eq!(bed.take("one").await, Take::Taken, "it has it already");
    let other = LockClaim { name: "locks/default/d", ..by("two") };
    assert_eq!(bed.service.take(&other).await.expect("answers"), Take::Taken, "another lock");
    bed.release("one").await;
    assert_eq!(bed.take("two").await, Take::Taken);
    assert_eq!(bed.take("one").await, Take::Busy);
}

async fn only_its_owner_can_keep_it_or_give_it_back(bed: Bed) {
    assert!(!bed.keep("nobody").await, "it was never taken");
    assert_eq!(bed.take("one").await, Take::Taken);
    assert!(!bed.keep("two").await);
    bed.release("two").await;
    assert_eq!(bed.take("three").await, Take::Busy);
    assert!(bed.keep("one").await);
    bed.release("one").await;
    assert!(!bed.keep("one").await, "it was given back");
    bed.release("one").await;
}

async fn who_does_not_keep_it_loses_it_and_who_does_has_it(bed: Bed) {
    assert_eq!(bed.take("one").await, Take::Taken);
    let began = Instant::now();
    while began.elapsed() < TTL * 2 {
        assert!(bed.keep("one").await);
        assert_eq!(bed.take("two").await, Take::Busy);
        tokio::time::sleep(TTL / 10).await;
    }
    let began = Instant::now();
    until("the next one has it", async || bed.take("two").await == Take::Taken).await;
    assert!(began.elapsed() < TTL + Duration::from_secs(4), "after {:?}", began.elapsed());
    assert!(!bed.keep("one").await);
    assert!(bed.keep("two").await);
}

async fn those_who_wait_are_served_in_the_order_in_which_they_came(bed: Bed) {
    let owners: Vec<String> = (0..5).map(|number| format!("owner {number}")).collect();
    for owner in &owners {
        bed.take(owner).await;
    }
    // Whoever asks first once it is free, it is the one who came first.
    for (index, owner) in owners.iter().enumerate() {
        for other in owners[index + 1..].iter().rev() {
            assert_eq!(bed.take(other).await, Take::Busy, "{other} while it is {owner}'s");
        }
        assert_eq!(bed.take(owner).await, Take::Taken);
        bed.release(owner).await;
    }
}

async fn who_waits_and_falls_silent_does_not_keep_others_waiting(bed: Bed) {
    assert_eq!(bed.take("one").await, Take::Taken);
    assert_eq!(bed.take("silent").await, Take::Busy);
    assert_eq!(bed.take("left").await, Take::Busy);
    assert_eq!(bed.take("next").await, Take::Busy);
    bed.release("left").await;
    bed.release("one").await;
    let began = Instant::now();
    until("the next one has it", async || bed.take("next").await == Take::Taken).await;
    assert!(began.elapsed() < Duration::from_secs(6), "after {:?}", began.elapsed());
}

async fn a_token_must_be_larger_than_every_one_before(bed: Bed) {
    let take = async |name: &str, owner: &str, token: u64| {
        let claim = LockClaim { name, owner, token: Some(token), ttl: TTL };
        let took = bed.service.take(&claim).await.expect("answers");
        let again = bed.service.take(&claim).await.expect("answers");
        assert_eq!(took, again, "the answer to a call that was repeated");
        took
    };
    assert_eq!(take(NAME, "one", 5).await, Take::Taken);
    bed.release("one").await;
    assert_eq!(take(NAME, "two", 5).await, Take::Outdated { largest: 5 });
    assert_eq!(take(NAME, "two", 4).await, Take::Outdated { largest: 5 });
    assert_eq!(take(NAME, "two", 1_000_000_000_000).await, Take::Taken);
    assert_eq!(take("locks/default/other", "three", 7).await, Take::Outdated { largest: 1_000_000_000_000 });
    assert_eq!(take("leaders/x", "four", 1_000_000_000_001).await, Take::Taken);
}

async fn any_process_can_go_on_for_an_owner(bed: Bed) {
    let other = connect(&bed.url).await;
    assert_eq!(bed.take("one").await, Take::Taken);
    assert_eq!(other.take(&by("one")).await.expect("answers"), Take::Taken);
    assert!(other.keep(&by("one")).await.expect("answers"));
    other.release(&by("one")).await.expect("answers");
    assert_eq!(bed.take("two").await, Take::Taken);
}

async fn many_at_once_never_have_it_together(bed: Bed) {
    let inside = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let mut all = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (service, inside) = (connect(&bed.url).await, Arc::clone(&inside));
        all.spawn(async move {
            for _ in 0..5 {
                let owner = Uuid::now_v7().to_string();
                let claim = LockClaim { name: NAME, owner: &owner, token: None, ttl: Duration::from_secs(20) };
                while service.take(&claim).await.expect("answers") != Take::Taken {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0, "two have it");
                tokio::time::sleep(Duration::from_millis(2)).await;
                inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                service.release(&claim).await.expect("answers");
            }
        });
    }
    while let Some(ended) = all.join_next().await {
        ended.expect("no two have it");
    }
}

/// As `redis-cli` and `etcdctl` would.
async fn other_programs_take_part(bed: Bed) {
    match bed.kind {
        Kind::Store => {}
        Kind::Redis => {
            let url = bed.url.split('?').next().expect("a URL");
            let client = ::redis::Client::open(url).expect("a URL of Redis");
            let mut redis = client.get_multiplexed_async_connection().await.expect("Redis answers");
            let set = async |redis: &mut ::redis::aio::MultiplexedConnection| -> Option<String> {
                let mut set = ::redis::cmd("SET");
                set.arg(bed.raw_name()).arg("somebody").arg("NX").arg("PX").arg(60_000);
                set.query_async(redis).await.expect("answers")
            };
            assert!(set(&mut redis).await.is_some());
            assert_eq!(bed.take("one").await, Take::Busy);
            bed.release("one").await;
            let _: () = ::redis::cmd("DEL").arg(bed.raw_name()).query_async(&mut redis).await.expect("answers");
            assert_eq!(bed.take("one").await, Take::Taken);
            assert!(set(&mut redis).await.is_none());
        }
        Kind::Etcd => {
            let member = std::env::var("LONGHAUL_TEST_ETCD").expect("it is there");
            let http = format!("{}/v3/kv", member.trim_end_matches('/'));
            // What `etcdctl lock` puts: a key under the lock's name.
            let key = base64(&format!("{}/5e1f", bed.raw_name()));
            post(&format!("{http}/put"), &format!(r#"{{"key": "{key}"}}"#)).await;
            assert_eq!(bed.take("one").await, Take::Busy);
            post(&format!("{http}/deleterange"), &format!(r#"{{"key": "{key}"}}"#)).await;
            assert_eq!(bed.take("one").await, Take::Taken);
            post(&format!("{http}/put"), &format!(r#"{{"key": "{key}"}}"#)).await;
            assert!(bed.keep("one").await, "it came first");
            // Somebody who removes a key by hand takes the lock away.
            let (from, to) = (base64(&format!("{}/", bed.raw_name())), base64(&format!("{}0", bed.raw_name())));
            let all = format!(r#"{{"key": "{from}", "range_end": "{to}"}}"#);
            post(&format!("{http}/deleterange"), &all).await;
            assert!(!bed.keep("one").await);
        }
    }
}

fn base64(text: &str) -> String {
    use ::base64::Engine as _;
    ::base64::engine::general_purpose::STANDARD.encode(text)
}

async fn post(url: &str, body: &str) {
    let curl = tokio::process::Command::new("curl").args(["-sf", "-X", "POST", url, "-d", body]).status();
    assert!(curl.await.expect("curl runs").success(), "{url}");
}

async fn what_is_wrong_with_a_url_or_a_login_is_said_without_the_secret(bed: Bed) {
    let address = bed.url.split("://").nth(1).expect("a URL");
    let host = address.split('?').next().expect("a host").rsplit('@').next().expect("a host");
    let scheme = bed.url.split(':').next().expect("a scheme");
    let wrong = [
        (format!("{scheme}://who:geheim@{host}"), "password"),
        (format!("{scheme}://who:geheim@127.0.0.1:1"), "not reachable"),
        (format!("{scheme}://who:geheim@{host}?ttl=2h"), "ttl"),
        (format!("{scheme}://who:geheim@{host}?tls=1"), "unknown parameter"),
        (format!("{scheme}://who:geheim@{host}?ca=/not/there"), "cannot be read"),
        ("nats://who:geheim@host".to_owned(), "redis://"),
    ];
    for (url, says) in wrong {
        if scheme == "redis" && url.contains("?ca=") {
            continue; // without TLS nobody reads it
        }
        let error = longhaul_bus::locks::connect(&url).await.err().expect(says).to_string();
        assert!(error.to_lowercase().contains(says), "{error}");
        assert!(!error.contains("geheim") && !error.contains("of the bus"), "{error}");
    }
    assert!(longhaul_bus::locks::connect("store:").await.expect("it is the store").is_none());
}

#[tokio::test]
async fn redis_is_reached_by_tls() {
    let Ok(url) = std::env::var("LONGHAUL_TEST_REDIS_TLS") else {
        eprintln!("skipped: needs Redis with TLS; set LONGHAUL_TEST_REDIS_TLS or use ./dev test");
        return;
    };
    let service = connect(&format!("{url}&prefix=test-{}", Uuid::now_v7().simple())).await;
    assert_eq!(service.take(&by("one")).await.expect("answers"), Take::Taken);
    let plain = url.split("&cert").next().expect("a URL");
    assert!(longhaul_bus::locks::connect(plain).await.is_err(), "it wants to see a certificate");
}

/// A private etcd with TLS, certificates of the private Redis, and a user.
#[tokio::test]
async fn etcd_is_reached_by_tls_with_a_login() {
    let variables = ["LONGHAUL_TEST_ETCD_CTL", "LONGHAUL_TEST_REDIS_TLS"].map(std::env::var);
    let [Ok(script), Ok(redis)] = variables else {
        eprintln!("skipped: needs an etcd and certificates; use ./dev test");
        return;
    };
    let script = std::fs::read_to_string(script).expect("the script is there");
    let program =
        script.split("command=(").nth(1).and_then(|command| command.split(' ').next()).expect("a program");
    let ca = redis.split("ca=").nth(1).and_then(|rest| rest.split('&').next()).expect("a certificate");
    let file = |name: &str| std::path::Path::new(ca).with_file_name(name);
    let folder = tempfile::tempdir().expect("a folder");
    let port =
        || std::net::TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port").port();
    let (client, peer) = (format!("https://127.0.0.1:{}", port()), format!("http://127.0.0.1:{}", port()));
    let etcd = tokio::process::Command::new(program)
        .args(["--name", "tls", "--log-level", "error", "--data-dir"])
        .arg(folder.path().join("data"))
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("tls={peer}"), "--cert-file"])
        .arg(file("server.pem"))
        .arg("--key-file")
        .arg(file("server.key"))
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn();
    let _etcd = etcd.expect("etcd starts");
    let login = |login: &str| format!("etcds://{login}{}?ca={ca}", client.trim_start_matches("https://"));
    until("it is up", async || longhaul_bus::locks::connect(&login("")).await.is_ok()).await;
    let not_yet = longhaul_bus::locks::connect(&login("root:geheim@")).await.err().expect("there are no users");
    assert!(not_yet.to_string().contains("leave user and password out"), "{not_yet}");
    for (what, body) in [
        ("user/add", r#"{"name": "root", "password": "geheim"}"#),
        ("role/add", r#"{"name": "root"}"#),
        ("user/grant", r#"{"user": "root", "role": "root"}"#),
        ("enable", "{}"),
    ] {
        let url = format!("{client}/v3/auth/{what}");
        let curl = tokio::process::Command::new("curl")
            .args(["-sf", "--cacert", ca, "-o", "/dev/null", "-X", "POST", &url, "-d", body])
            .status();
        assert!(curl.await.expect("curl runs").success(), "{what}");
    }
    assert!(longhaul_bus::locks::connect(&login("")).await.is_err(), "it wants a login now");
    let wrong = longhaul_bus::locks::connect(&login("root:falsch@")).await.err().expect("it is wrong");
    assert!(wrong.to_string().contains("check the user") && !wrong.to_string().contains("falsch"), "{wrong}");
    let service = connect(&login("root:geheim@")).await;
    assert_eq!(service.take(&by("one")).await.expect("answers"), Take::Taken);
    assert_eq!(service.take(&by("two")).await.expect("answers"), Take::Busy);
    // Who is not trusted is not talked to.
    let untrusted = login("root:geheim@").split('?').next().expect("a URL").to_owned();
    assert!(longhaul_bus::locks::connect(&untrusted).await.is_err());
}
