//! Runs of contestants in turn.

use anyhow::Result;

/// Runs all contestants once a round, each round in the other order. So what drifts steadily is the same for all. Returns the runs of each
/// contestant, in the order of the rounds.
///
/// # Errors
/// Where a run fails.
pub(crate) fn interleave<T>(
    rounds: usize,
    contestants: usize,
    mut run: impl FnMut(usize) -> Result<T>,
) -> Result<Vec<Vec<T>>> {
    let mut runs: Vec<Vec<T>> = (0..contestants).map(|_| Vec::new()).collect();
    for round in 0..rounds {
        for place in 0..contestants {
            let which = if round % 2 == 0 { place } else { contestants - 1 - place };
            let taken = run(which)?;
            if let Some(runs) = runs.get_mut(which) {
                runs.push(taken);
            }
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contestants_take_turns_within_each_round() {
        let mut order = Vec::new();
        let runs = interleave(5, 2, |which| {
            order.push(which);
            Ok(order.len())
        })
        .unwrap();
        assert_eq!(order, [0, 1, 1, 0, 0, 1, 1, 0, 0, 1]);
        assert_eq!(runs, [[1, 4, 5, 8, 9], [2, 3, 6, 7, 10]]);
    }

    #[test]
    fn a_run_that_fails_ends_all() {
        let failing = |which| if which == 1 { anyhow::bail!("gone") } else { Ok(()) };
        assert!(interleave(1, 2, failing).is_err());
    }
}
