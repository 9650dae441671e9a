//! The log: gapless, in order, and exactly the rest for who comes back.

use std::collections::HashSet;

use super::bed::{Bed, completed, done, raw, write};
use crate::record::Record;
use crate::state::StatePatch;
use crate::store::{Action, LOG_PAGE};
use crate::task::TaskId;

async fn numbers_are_gapless_while_a_run_and_others_write_at_once(bed: Bed) {
    let lease = bed.running().await;
    let id = lease.task;
    let other = bed.another_process().await;
    let mut writers = Vec::new();
    for n in 0..4u8 {
        let bed = if n % 2 == 0 { bed.clone() } else { other.clone() };
        writers.push(tokio::spawn(async move {
            for round in 0..15u8 {
                let patch = StatePatch { set_goal: Some(format!("{n} {round}")), ..StatePatch::default() };
                let action = if round % 2 == 0 {
                    Action::Patch { patch, version: None, under: None }
                } else {
                    Action::Priority((n + round) % 10)
                };
                bed.control(id, action).await.expect("accepted");
            }
        }));
    }
    let mut own = HashSet::new();
    for number in 1..=40 {
        let written = bed
            .commit(write(&lease, number).step(&format!("s{number}")).event("progress"))
            .await
            .expect("written");
        assert_eq!(written.last_seq, written.first_seq + 1);
        assert!(own.insert(written.first_seq) && own.insert(written.last_seq), "numbers given twice");
    }
    for writer in writers {
        writer.await.expect("no panic");
    }
    for event in bed.events(id).await {
        let by_run = event.run == lease.fence && event.kind != "task.started";
        assert_eq!(own.contains(&event.seq), by_run, "{event:?}");
    }
}

async fn who_comes_back_with_a_number_gets_exactly_the_rest(bed: Bed) {
    let lease = bed.running().await;
    bed.commit(write(&lease, 1).event("a").event("b").event("c")).await.expect("written");
    bed.commit(write(&lease, 2).outcome(completed())).await.expect("written");
    for after in 0..=6u64 {
        let rows = bed.store.log(lease.task, after, LOG_PAGE).await.expect("the store answers");
        let rest: Vec<u64> = rows
            .iter()
            .flat_map(|row| row.events_of(lease.task))
            .map(|event| event.seq)
            .filter(|&seq| seq > after)
            .collect();
        assert_eq!(rest, (after + 1..=6).collect::<Vec<_>>());
        assert!(rows.iter().all(|row| row.last_seq() > after), "no row that is known already");
    }
    assert!(bed.store.log(lease.task, u64::MAX, LOG_PAGE).await.expect("the store answers").is_empty());
    assert!(bed.store.log(TaskId::new(), 0, LOG_PAGE).await.expect("the store answers").is_empty());
}

async fn a_large_log_comes_in_pieces_and_a_large_row_whole(bed: Bed) {
    let lease = bed.running().await;
    let large = format!("\"{}\"", "x".repeat(700_000));
    for number in 1..=4 {
        bed.commit(write(&lease, number).record(done(&format!("s{number}"), &large)).event("step.completed"))
            .await
            .expect("written");
    }
    let huge = format!("\"{}\"", "y".repeat(3_000_000));
    bed.commit(write(&lease, 5).record(done("huge", &huge)).event("step.completed")).await.expect("written");
    let first = bed.store.log(lease.task, 0, LOG_PAGE).await.expect("the store answers");
    let bytes: usize = first.iter().map(|row| row.records.as_ref().map_or(0, String::len)).sum();
    assert!(!first.is_empty() && bytes <= 2_000_000, "about 1 MB at a time, not {bytes}");
    let results: Vec<usize> = bed
        .records(lease.task)
        .await
        .iter()
        .filter_map(
            |record| if let Record::Done { result, .. } = record { Some(result.get().len()) } else { None },
        )
        .collect();
    assert_eq!(results, [700_002, 700_002, 700_002, 700_002, 3_000_002]);
}

async fn a_claim_reads_a_short_but_large_log_without_losing_any_of_it(bed: Bed) {
    let lease = bed.running().await;
    let large = raw(&format!("\"{}\"", "x".repeat(900_000)));
    for number in 1..=4 {
        bed.commit(write(&lease, number).record(done(&format!("s{number}"), large.get())).event("step.completed"))
            .await
            .expect("written");
    }
    bed.end_with(&lease, 5, crate::store::Outcome::Released).await;
    let lease = bed.claim_one().await;
    let records = lease.log.iter().flat_map(|row| crate::record::records_of(row).expect("readable")).count();
    assert!(records == 5 || lease.log.len() == 1, "all of it or only the first row, not {} rows", lease.log.len());
}

async fn times_of_the_log_never_go_back(bed: Bed) {
    let lease = bed.running().await;
    for number in 1..=5 {
        bed.advance(1);
        bed.commit(write(&lease, number).step(&format!("s{number}"))).await.expect("written");
    }
    let rows = bed.log(lease.task).await;
    assert!(rows.windows(2).all(|pair| pair[0].time <= pair[1].time));
    let (first, last) = (rows[0].time, rows[rows.len() - 1].time);
    assert!((5_000_000..60_000_000).contains(&(last - first)), "by the store's clock");
    let task = bed.task(lease.task).await;
    assert_eq!(task.created_at.as_microsecond(), first);
    assert_eq!(task.updated_at.as_microsecond(), last);
}

async fn tasks_with_news_are_told_apart_from_those_without_and_those_gone(bed: Bed) {
    let ids = bed.submit_many(3).await;
    let gone = TaskId::new();
    bed.cancel(ids[1]).await.expect("cancelled");
    let known: Vec<(TaskId, u64)> = ids.iter().map(|&id| (id, 1)).chain([(gone, 4)]).collect();
    let mut advanced = bed.store.advanced(&known).await.expect("the store answers");
    advanced.sort();
    let mut expected = [(ids[1], 2), (gone, 0)];
    expected.sort();
    assert_eq!(advanced, expected);
    assert!(bed.store.advanced(&[(ids[0], u64::MAX)]).await.expect("the store answers").is_empty());
    assert!(bed.store.advanced(&[]).await.expect("the store answers").is_empty());
}

on_every_store![
    numbers_are_gapless_while_a_run_and_others_write_at_once,
    who_comes_back_with_a_number_gets_exactly_the_rest,
    a_large_log_comes_in_pieces_and_a_large_row_whole,
    a_claim_reads_a_short_but_large_log_without_losing_any_of_it,
    times_of_the_log_never_go_back,
    tasks_with_news_are_told_apart_from_those_without_and_those_gone,
];
