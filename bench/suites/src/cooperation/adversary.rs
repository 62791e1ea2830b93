//! What a tenant finds out of the provider's racks by what it is told. It also measures what being told is worth to it. It is an
//! experiment of control's own tests, in virtual time.

use super::{Suite, experiment};
use crate::row::{Better, Case, Row};
use anyhow::Result;
use serde::Deserialize;

/// Most that what is told may add to the adjusted Rand index of probing alone.
const MAX_DISCLOSED_GAIN: f64 = 0.02;
/// Least that what is known, told as it is, would add: else the adversary is no good.
const MIN_FULL_GAIN: f64 = 0.3;
/// Least part of what everything would gain that a tenant has of events.
const MIN_BENEFIT: f64 = 0.7;

/// What the experiment prints.
#[derive(Debug, Deserialize)]
struct AdversaryResult {
    fabrics: usize,
    ranks: usize,
    probing: Vec<Probing>,
    /// Part of the gain of everything that events bring.
    worth: f64,
    /// What everything brings, as a part of what is done without.
    everything: f64,
    /// How well a neighbour is told from nothing: by what is told, and by what is known.
    presence: [f64; 2],
}

#[derive(Debug, Deserialize)]
struct Probing {
    noise: Noise,
    strategy: Strategy,
    /// Adjusted Rand index of probing alone.
    alone: f64,
    /// What is added, and its standard error.
    disclosed: [f64; 2],
    full: [f64; 2],
}

/// How well the tenant measures delays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Noise {
    Weak,
    Medium,
    Strong,
}

/// How the tenant groups its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Strategy {
    Pairs,
    Threes,
    Turns,
}

pub(super) fn adversary(suite: &Suite) -> Result<Vec<Row>> {
    let fewer: &[(&str, &str)] = if suite.request.smoke { &[("FABRICS", "6"), ("WHILES", "4")] } else { &[] };
    let (text, line) = experiment("adversary::full", true, fewer)?;
    let found: AdversaryResult = serde_json::from_str(&line)?;
    eprint!(
        "{}",
        text.lines().filter(|line| line.starts_with("  ")).fold(String::new(), |all, line| all + line + "\n")
    );
    let case = |case: String, better| Case::new("cooperation", case, better, 1.0).of(0, found.ranks);
    let mut rows = Vec::new();
    for Probing { noise, strategy, alone, disclosed: told, full: known } in &found.probing {
        let name = format!("{noise:?} probing, {strategy:?}").to_lowercase();
        eprintln!(
            "{name}: {alone:.3} alone, told {:+.3} +- {:.3}, known {:+.3} +- {:.3}",
            told[0], told[1], known[0], known[1]
        );
        let what =
            format!("{} fabrics, {name} ({alone:.2} alone): adjusted Rand index added by", found.fabrics);
        rows.push(
            case(format!("{what} what is told"), Better::Less).limit(&[told[0].max(0.0)], MAX_DISCLOSED_GAIN),
        );
        // Who has others of its ranks together each time asks for nothing: it gains nothing by what is known either.
        if (*noise, *strategy) == (Noise::Weak, Strategy::Pairs) {
            rows.push(case(format!("{what} what is known"), Better::More).limit(&[known[0]], MIN_FULL_GAIN));
        }
    }
    let gain = format!(
        "a tenant that heeds events: part of what all knowledge gains ({:.0}%)",
        found.everything * 100.0
    );
    rows.push(case(gain, Better::More).limit(&[found.worth], MIN_BENEFIT));
    let [told, known] = found.presence;
    eprintln!(
        "a neighbour's presence: area under the curve {told:.3} by what is told, {known:.3} by what is known"
    );
    Ok(rows)
}
