//! Ranks as text, short however many there are.

use harmonaize_abi::Rank;

/// Most runs of ranks that a text names.
const MAX_RUNS: usize = 16;

/// Ascending, each once.
pub(crate) fn sorted(ranks: &[Rank]) -> Vec<Rank> {
    let mut ranks = ranks.to_vec();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// "rank 3", "ranks 0-2, 7", "ranks 0, 2, … and 40 more", "no rank".
pub(crate) fn list(ranks: &[Rank]) -> String {
    let ranks = sorted(ranks);
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for Rank(rank) in ranks.iter().copied() {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(rank) => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let show = |(first, last): &(u32, u32)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    let named: Vec<String> = runs.iter().take(MAX_RUNS).map(show).collect();
    let more: u64 = runs.iter().skip(MAX_RUNS).map(|(first, last)| u64::from(last - first) + 1).sum();
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    match ranks.len() {
        0 => "no rank".to_owned(),
        1 => format!("rank {}", named.concat()),
        _ => format!("ranks {}{more}", named.join(", ")),
    }
}

/// "has" or "have", "is" or "are".
pub(crate) fn verb<'a>(ranks: &[Rank], one: &'a str, many: &'a str) -> &'a str {
    if sorted(ranks).len() == 1 { one } else { many }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_short() {
        let list = |ranks: &[u32]| list(&ranks.iter().copied().map(Rank).collect::<Vec<_>>());
        assert_eq!(list(&[]), "no rank");
        assert_eq!(list(&[3]), "rank 3");
        assert_eq!(list(&[3, 3]), "rank 3");
        assert_eq!(list(&[7, 1, 0, 2]), "ranks 0-2, 7");
        assert_eq!(list(&[4, 5, u32::MAX]), "ranks 4, 5, 4294967295");
        let many: Vec<u32> = (0..100).map(|rank| rank * 2).collect();
        assert_eq!(
            list(&many),
            "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 and 84 more"
        );
    }
}
