//! A plan as tables.

use std::fmt::Write;

use indicatif::BinaryBytes;

use super::super::output::{number, table};
use super::{Cost, Report};
use crate::plan::cost::{ALL_GATHER_US, Link, MERGE_US};
use crate::plan::{Layout, Message, RankPlan};

/// Rows of a table that people still read; the JSON has all of them.
const MOST_ROWS: usize = 40;
/// Items of a list in a cell.
const MOST_ITEMS: usize = 4;

pub(super) fn text(report: &Report) -> String {
    [heading(report), ranks(report), messages(report), heap(report), cost(report)].join("\n")
}

fn heading(report: &Report) -> String {
    let (plan, s) = (&report.plan, &report.sizes);
    let sequences = match &plan.layout {
        Layout::Packed { .. } => format!("{} packed", count(plan.layout.sequences(), "sequence")),
        Layout::Batch { b, .. } => format!("{} of a batch", count(*b, "row")),
    };
    format!(
        "{} on {}: {sequences}, H = {}, HV = {}, K = {}, V = {}, S in f32, M in {}\n",
        count(plan.layout.tokens(), "token"),
        count(plan.pes(), "PE"),
        report.heads,
        s.hv,
        s.k,
        s.v,
        if s.m_bytes == 2 { "bf16" } else { "f32" },
    )
}

fn ranks(report: &Report) -> String {
    let mut table = table([
        number("PE"),
        number("tokens"),
        "from..to".into(),
        "sequences: tokens".into(),
        "receives from".into(),
        "sends to".into(),
    ]);
    for (r, rank) in report.plan.ranks.iter().enumerate().take(MOST_ROWS) {
        let segments = list(rank.segments.iter().map(|s| format!("{}: {}", s.seq, s.len)));
        table.add_row(vec![
            number(r),
            number(rank.tokens),
            format!("{}..{}", report.plan.cuts[r], report.plan.cuts[r + 1]).into(),
            segments.into(),
            list(sources(rank)).into(),
            list(targets(rank)).into(),
        ]);
    }
    format!("Who holds what\n{}\n{}", table.trim_fmt(), more(report.plan.pes(), "PE"))
}

/// PEs that this one receives from, each once, whatever the number of sequences.
fn sources(rank: &RankPlan) -> Vec<String> {
    let mut from: Vec<usize> = rank.receiving().flat_map(|(_, receive)| receive.from.iter().copied()).collect();
    from.sort_unstable();
    from.dedup();
    from.iter().map(ToString::to_string).collect()
}

fn targets(rank: &RankPlan) -> Vec<String> {
    let mut to: Vec<usize> = rank.sending().flat_map(|(_, send)| send.to.iter().map(|t| t.rank)).collect();
    to.sort_unstable();
    to.dedup();
    to.iter().map(ToString::to_string).collect()
}

fn messages(report: &Report) -> String {
    if report.push.is_empty() {
        return "No sequence lies across a cut: nothing is sent.\n".into();
    }
    let mut table = table(["from", "to", "sequence", "S", "M"].map(number));
    for m in report.push.iter().take(MOST_ROWS) {
        let bytes_m = if m.bytes_m == 0 { "-".into() } else { bytes(m.bytes_m) };
        table.add_row(vec![number(m.from), number(m.to), number(m.seq), number(bytes(m.bytes_s)), number(bytes_m)]);
    }
    let total = |messages: &[Message]| bytes(messages.iter().map(|m| m.bytes_s + m.bytes_m).sum());
    format!(
        "Who sends what to whom (modes overlap and bulk)\n{}\n{}{} in all. The first PE of a sequence knows its state, so it sends no M.\n\
         Mode exact sends S to the next PE only: {}, {} in all.\n",
        table.trim_fmt(),
        more(report.push.len(), "message"),
        total(&report.push),
        count(report.chain.len(), "message"),
        total(&report.chain),
    ) + &backward(report)
}

/// The messages of the backward pass, of which the table above tells all but the M.
fn backward(report: &Report) -> String {
    let (Some(back), Some(saved)) = (&report.back, &report.saved) else { return String::new() };
    format!(
        "Backward the same ways the other way round: {}, {} in all; the last PE of a sequence sends no M.\n\
         Kept between forward and backward: up to {} on a PE.\n",
        count(back.len(), "message"),
        bytes(back.iter().map(|m| m.bytes_s + m.bytes_m).sum()),
        bytes(saved.iter().copied().max().unwrap_or(0)),
    )
}

fn heap(report: &Report) -> String {
    let h = &report.heap;
    if h.total() == 0 {
        return "Symmetric heap of each PE: none is needed.\n".into();
    }
    format!(
        "Symmetric heap of each PE{}: {} (slots {}, signals and other words {}); it does not grow with the tokens.\n",
        if report.back.is_some() { " for both directions" } else { "" },
        bytes(h.total()),
        bytes(h.slots),
        bytes(h.words),
    )
}

fn cost(report: &Report) -> String {
    let Some(Cost { question, schemes }) = &report.cost else {
        return "Nothing is exchanged, so it costs no time.\n".into();
    };
    let mut table = table([
        "scheme".into(),
        number("us, nothing hidden"),
        number("us, bytes hidden"),
        number("into the busiest PE"),
        "".into(),
    ]);
    for e in schemes {
        table.add_row(vec![
            e.scheme.to_string().into(),
            number(format!("{:.1}", e.us)),
            number(e.floor_us.map_or("-".into(), |us| format!("{us:.1}"))),
            number(bytes(e.bytes_in as usize)),
            if e.cheapest { "cheapest" } else { "" }.into(),
        ]);
    }
    let link = report.link;
    let (nodes, gpus) = (question.topology.nodes, question.topology.gpus);
    let mut text = format!(
        "Modelled time from the last local scan to the last state, widest sequence: {} on {}\n{}\n",
        count(nodes * gpus, "PE"),
        if nodes == 1 { "one node".into() } else { format!("{nodes} nodes of {gpus}") },
        table.trim_fmt(),
    );
    let origin = |measured: bool| if measured { "measured" } else { "assumed" };
    let mut figures =
        vec![format!("{link} {} us, {} GB/s ({})", link.latency_us(), link.gb_per_s(), origin(link.measured()))];
    if nodes > 1 {
        let ib = Link::Ib;
        figures.push(format!(
            "between nodes ib {} us, {} GB/s ({})",
            ib.latency_us(),
            ib.gb_per_s(),
            origin(ib.measured())
        ));
    }
    figures.push(format!("merge {} us (assumed)", MERGE_US));
    figures.push(format!("all-gather's start {ALL_GATHER_US} us on up to 8 PEs (measured)"));
    // Writing into a String cannot fail.
    let _ = writeln!(
        text,
        "Modes overlap and bulk push, mode exact is the chain. Mode overlap hides bytes of heads that are done under those that are not.\nFigures used: {}.",
        figures.join("; ")
    );
    text
}

fn list(items: impl IntoIterator<Item = String>) -> String {
    let items: Vec<String> = items.into_iter().collect();
    match items.len() {
        0 => "-".into(),
        n if n > MOST_ITEMS => format!("{}, and {} more", items[..MOST_ITEMS].join(", "), n - MOST_ITEMS),
        _ => items.join(", "),
    }
}

fn more(rows: usize, what: &str) -> String {
    match rows.saturating_sub(MOST_ROWS) {
        0 => String::new(),
        rest => format!("and {rest} more {what}s; --json lists all\n"),
    }
}

fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

fn bytes(n: usize) -> String {
    BinaryBytes(n as u64).to_string()
}
