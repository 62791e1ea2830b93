//! What workers print of an elastic job that the provider places, and what came of its steps. `bench` has the program.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// A line that a worker prints. Times in microseconds from 1970.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[expect(missing_docs, reason = "each line says what its fields are")]
pub enum Line {
    /// It is one of so many workers of a generation, and so many steps were done before.
    Placed { at_us: u64, generation: u64, rank: u32, workers: u32, steps: u64 },
    /// A step from 0 is done, whose sum was right; and the AllReduce's microseconds.
    Worked { at_us: u64, step: u64, generation: u64, collective_us: u64 },
    /// It ends, as it was asked to, after so many steps of all workers. Each is in its sum exactly once.
    Ended { at_us: u64, steps: u64 },
}

/// What came of a job's steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Steps {
    /// Different ones that were done.
    pub done: u64,
    /// Those before the last one that nobody did.
    pub lost: u64,
    /// Those that one worker did twice, or two generations each.
    pub twice: u64,
    /// Those that were done when its last worker ended as it was asked to; 0 where none ended so.
    pub ended: u64,
}

impl Steps {
    /// Of what was printed on each host, where one worker may have followed another.
    pub fn of(hosts: &[Vec<Line>]) -> Self {
        let mut generations: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        let mut twice: BTreeSet<u64> = BTreeSet::new();
        let mut ended = 0;
        for lines in hosts {
            let mut own: BTreeSet<u64> = BTreeSet::new();
            for line in lines {
                match line {
                    Line::Placed { .. } => {}
                    Line::Worked { step, generation, .. } => {
                        generations.entry(*step).or_default().insert(*generation);
                        if !own.insert(*step) {
                            twice.insert(*step);
                        }
                    }
                    Line::Ended { steps, .. } => ended = ended.max(*steps),
                }
            }
        }
        twice.extend(generations.iter().filter(|(_, of)| of.len() > 1).map(|(step, _)| *step));
        let done = generations.len() as u64;
        let all = generations.last_key_value().map_or(0, |(last, _)| last.saturating_add(1));
        Self { done, lost: all.saturating_sub(done), twice: twice.len() as u64, ended }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worked(steps: &[(u64, u64)]) -> Vec<Line> {
        let line = |(step, generation): &(u64, u64)| Line::Worked {
            at_us: 1,
            step: *step,
            generation: *generation,
            collective_us: 2,
        };
        steps.iter().map(line).collect()
    }

    #[test]
    fn steps_of_all_workers_count_once() {
        let hosts = [worked(&[(0, 1), (1, 1), (2, 2)]), worked(&[(0, 1), (1, 1)])];
        assert_eq!(Steps::of(&hosts), Steps { done: 3, lost: 0, twice: 0, ended: 0 });
        assert_eq!(Steps::of(&[]), Steps::default());
    }

    #[test]
    fn lost_and_repeated_steps_are_seen() {
        assert_eq!(Steps::of(&[worked(&[(0, 1), (3, 1)])]), Steps { done: 2, lost: 2, twice: 0, ended: 0 });
        let generations = [worked(&[(0, 1), (1, 1)]), worked(&[(1, 2)])];
        assert_eq!(Steps::of(&generations), Steps { done: 2, lost: 0, twice: 1, ended: 0 });
        assert_eq!(Steps::of(&[worked(&[(0, 1), (0, 1)])]), Steps { done: 1, lost: 0, twice: 1, ended: 0 });
    }

    #[test]
    fn the_last_end_of_a_worker_counts() {
        let ended = |steps| Line::Ended { at_us: 3, steps };
        let first = [worked(&[(0, 1)]), vec![ended(1)]].concat();
        let hosts = [first, worked(&[(0, 1), (1, 2)])];
        assert_eq!(Steps::of(&hosts), Steps { done: 2, ended: 1, ..Steps::default() });
        let [first, last] = hosts;
        let hosts = [first, [last, vec![ended(2)]].concat()];
        assert_eq!(Steps::of(&hosts), Steps { done: 2, ended: 2, ..Steps::default() });
    }

    #[test]
    fn a_line_survives_its_text() {
        let line = Line::Placed { at_us: 1, generation: 2, rank: 0, workers: 1, steps: 7 };
        let text = serde_json::to_string(&line).unwrap();
        assert!(text.starts_with(r#"{"event":"placed","#), "{text}");
        assert_eq!(serde_json::from_str::<Line>(&text).unwrap(), line);
    }
}
