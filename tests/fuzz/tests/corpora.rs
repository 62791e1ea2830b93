//! The kept corpora, played on every run of the tests: an input that once led somewhere leads to no failure.
#![allow(clippy::unwrap_used)] // tests alone

use harmonaize_fuzz::TARGETS;
use std::path::Path;

/// Most bytes of a corpus: it is kept in the tree.
const MOST: u64 = 16 << 10;

#[test]
fn kept_inputs_pass_their_targets() {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpora");
    for target in TARGETS {
        let (mut inputs, mut bytes) = (0, 0);
        for input in std::fs::read_dir(corpora.join(target.name)).unwrap() {
            let input = std::fs::read(input.unwrap().path()).unwrap();
            (target.run)(&input);
            inputs += 1;
            bytes += input.len() as u64;
        }
        assert!(inputs > 0 && bytes <= MOST, "{}: {inputs} inputs of {bytes} bytes", target.name);
    }
    // What belongs to no target would be fuzzed by none.
    assert_eq!(std::fs::read_dir(corpora).unwrap().count(), TARGETS.len());
}
