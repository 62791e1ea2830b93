//! A compressed AllReduce keeps the budget of its sum, for any number of participants, and says what it lost.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod common;

use common::{Outcome, Part, normal};
use harmonaize_abi::{View, ViewMut};
use harmonaize_codec::{
    Budget, Codec, CodecError, HEADER_BYTES, Header, Squares, Terms, header, state, whole,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Inputs of any size and shape: alike at all ranks, or not; with heavy tails; small and large.
fn any_input(seed: u64, elements: usize) -> impl FnMut(usize) -> Vec<f32> {
    move |rank| {
        let mut shape = ChaCha8Rng::seed_from_u64(seed);
        let (alike, tails) = (shape.random_bool(0.3), shape.random_bool(0.5));
        let scale = [1e-20, 1e-3, 1.0, 1e15][shape.random_range(0..4)];
        let mut random = ChaCha8Rng::seed_from_u64(seed + 1000 * if alike { 1 } else { 1 + rank as u64 });
        let mut one = || normal(&mut random) * if tails { normal(&mut random).powi(3) } else { 1.0 };
        (0..elements).map(|_| one() * scale).collect()
    }
}

#[test]
fn the_sum_keeps_its_budget_whatever_the_codec_and_the_ranks() {
    let (mut coded, mut exact) = (0, 0);
    for seed in 0..400 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let (name, codec) = Codec::NAMED[random.random_range(0..Codec::NAMED.len())];
        let most = [1e-6, 1e-4, 1e-2, 0.1, 1.0][random.random_range(0..5)];
        let ranks: Vec<u32> = (0..random.random_range(2..=8)).map(|_| random.random_range(1..=3)).collect();
        let elements = [1, 2, 17, 256, 257, 1025, 5000][random.random_range(0..7)];
        let terms = Terms { codec, finer: None, max_error: Some(most), participants: ranks.len() as u32 };
        let part = Part::new(terms, &ranks, elements, &mut any_input(seed, elements));
        for average in [false, true] {
            let outcome = part.run(seed, average);
            let lost = part.error(&outcome, average) / part.signal;
            // Beside what is coded, each sum in f32 rounds, in the same direction perhaps.
            let lost = (lost.sqrt() - 2e-6).max(0.0).powi(2);
            let what = format!("seed {seed}: {name} of {elements} at {ranks:?}");
            assert!(lost <= most, "{what} lost {lost}, not {most}: {:?}", outcome.stated);
            let told = outcome.stated.error / part.signal;
            assert!(lost <= told, "{what} lost {lost} and told {told}");
            assert!(outcome.measured <= outcome.stated.error, "{what} measured {}", outcome.measured);
            assert!(outcome.stated.relative() <= most, "{what} told {:?}", outcome.stated);
            assert!(
                outcome.stated.signal <= part.signal * 1.00001,
                "{what}: {:?}, not {}",
                outcome.stated,
                part.signal
            );
            if outcome.refused == 0 && codec != Codec::EXACT { coded += 1 } else { exact += 1 }
        }
    }
    assert!(coded > 100 && exact > 100, "{coded} coded, {exact} exact");
}

/// The kind of input of which few elements hold all that is lost. Of it chance may make more than is reported, but not more than
/// the budget, of which that is little.
const FEW: usize = 3;

/// Inputs of one step after another. Some lose little, some much, some all in few elements, alike at all ranks or not.
fn changing_input(seed: u64, step: usize, elements: usize) -> (usize, impl FnMut(usize) -> Vec<f32>) {
    let mut shape = ChaCha8Rng::seed_from_u64(seed * 1000 + step as u64);
    let (alike, every) = (shape.random_bool(0.3), shape.random_range(3..300));
    let kind = if step.is_multiple_of(2) { 0 } else { shape.random_range(1..5) };
    let inputs = move |rank: usize| {
        let mut random = ChaCha8Rng::seed_from_u64(seed + 1000 * if alike { 1 } else { 1 + rank as u64 });
        let mut one = |index: usize| match kind {
            0 => random.random_range(-1.0..1.0),
            1 if index.is_multiple_of(every) => 30.0 * normal(&mut random),
            1 => normal(&mut random),
            2 => normal(&mut random).powi(5),
            FEW if index.is_multiple_of(every) => 0.4 / 127.0,
            FEW => f32::from(u8::from(index % every == 1)),
            // One part of a tensor alone.
            _ if index < 256 => normal(&mut random),
            _ => 1e-3 * normal(&mut random),
        };
        (0..elements).map(&mut one).collect()
    };
    (kind, inputs)
}

#[test]
fn a_finer_codec_keeps_the_sums_budget() {
    let named = |name| Codec::named(name).unwrap();
    let pairs = [
        ("int8", "bf16"),
        ("int4", "int8"),
        ("rotated 4", "int8 stochastic"),
        ("rotated 2", "rotated 4"),
        ("rotated 3", "int8 stochastic"),
    ];
    let (mut uses, mut finer_bytes, mut alone_bytes) = ([0; 3], 0, 0);
    for seed in 0..60 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let (coarse, finer) = pairs[random.random_range(0..pairs.len())];
        let (codec, finer) = (named(coarse), named(finer));
        // Near to where the coarse one's loss is.
        let most = [1e-4, 1e-3, 2e-3, 0.02, 0.05, 0.3][random.random_range(0..6)];
        let ranks: Vec<u32> = (0..random.random_range(2..=8)).map(|_| random.random_range(1..=2)).collect();
        let elements = [17, 256, 1025, 4096, 8192][random.random_range(0..5)];
        let participants = ranks.len() as u32;
        let alone = Terms { codec, finer: None, max_error: Some(most), participants };
        for step in 0..12 {
            let (kind, mut inputs) = changing_input(seed, step, elements);
            let mut part = |terms| Part::new(terms, &ranks, elements, &mut inputs);
            let average = step % 3 == 0;
            let part_finer = part(Terms { finer: Some(finer), ..alone });
            let outcome = part_finer.run(seed << 8 | step as u64, average);
            let lost = part_finer.error(&outcome, average) / part_finer.signal;
            let lost = (lost.sqrt() - 2e-6).max(0.0).powi(2);
            let what =
                format!("seed {seed}, {step}: {coarse} of {elements} at {ranks:?}: {:?}", outcome.codecs);
            let told = outcome.stated.error / part_finer.signal;
            let known = lost <= told || kind == FEW || elements < 256;
            assert!(lost <= most && known, "{what} lost {lost} and told {told}, not {most}");
            assert!(outcome.stated.relative() <= most, "{what} told {:?}", outcome.stated);
            assert!(outcome.measured <= outcome.stated.error, "{what} measured {}", outcome.measured);
            let before = part(alone).run(seed << 8 | step as u64, average);
            (finer_bytes, alone_bytes) = (finer_bytes + outcome.bytes, alone_bytes + before.bytes);
            // What holds in the coarse codec is in it; only what would have been exact is in the finer one.
            let contributions = || outcome.codecs.iter().zip(&before.codecs).take(ranks.len() - 1);
            let kept = contributions().all(|(now, before)| now == before || *before == Codec::EXACT);
            assert!(kept, "{what}, not {:?}", before.codecs);
            for codec in &outcome.codecs {
                let place = [alone.codec, finer, Codec::EXACT].iter().position(|known| known == codec);
                uses[place.expect("another codec")] += 1;
            }
        }
    }
    println!(
        "{uses:?} chunks coarse, finer, exact; {finer_bytes} bytes, {alone_bytes} without a finer codec"
    );
    assert!(uses[..2].iter().all(|uses| *uses > 300), "{uses:?}");
    assert!(finer_bytes * 10 < alone_bytes * 8, "{finer_bytes} {alone_bytes}");
}

/// Errors of codecs of both kinds are not added as if all were independent. A finer codec of the other kind is none.
#[test]
fn a_finer_codec_of_the_other_kind_is_not_used() {
    let values: Vec<f32> = (0..2048).map(|index| (index as f32 * 0.37).sin()).collect();
    let mut chunk = vec![0; 4 * 2048 + 128];
    let terms = |finer| {
        let finer = Some(finer);
        Terms { codec: Codec::INT4, finer, max_error: Some(1e-3), participants: 3 }
    };
    for (finer, found) in [(Codec::INT8, Codec::INT8), (Codec::rotated(4), Codec::EXACT)] {
        let (from, to) = (View::from(&values[..]), ViewMut::from(&mut chunk[..]));
        let terms = terms(finer);
        assert_eq!(whole(|passes| terms.contribute(passes, 1, 1, from, to)).unwrap().codec, found);
    }
    let other = Terms { codec: Codec::rotated(4), max_error: None, ..terms(Codec::INT8) };
    let (from, to) = (View::from(&values[..]), ViewMut::from(&mut chunk[..]));
    let coded = whole(|passes| other.contribute(passes, 1, 1, from, to)).unwrap();
    let mut sum = vec![0.0; 2048];
    let to = ViewMut::from(&mut sum[..]);
    let terms = terms(Codec::rotated(4));
    let refused = whole(|passes| terms.take(passes, View::from(&chunk[..coded.bytes]), to));
    assert_eq!(refused, Err(CodecError::NotAgreed { given: Codec::rotated(4) }));
}

/// Five and more by 4 bits: what sums lose beyond a fiftieth costs them 8 bits, not 32.
#[test]
fn larger_sums_need_no_exact_chunk() {
    for participants in 5..=8 {
        let finer = Codec::named("int8 stochastic");
        let terms = Terms { codec: Codec::rotated(4), finer, max_error: Some(0.02), participants };
        let part = Part::new(terms, &vec![1; participants as usize], 1 << 16, &mut |rank| {
            let mut random = ChaCha8Rng::seed_from_u64(rank as u64);
            (0..1 << 16).map(|_| normal(&mut random) / random.random_range(0.05..1.0_f32)).collect()
        });
        let outcome = part.run(1, false);
        let (lost, told) = (part.error(&outcome, false) / part.signal, outcome.stated.relative());
        println!("{participants}: lost {lost:.4}, told {told:.4}, {:?}", outcome.codecs.last());
        assert!(outcome.refused == 0 && lost <= told && told <= 0.02, "{participants}: {told}");
    }
}

/// Zeros left out change no bit of a sum, whatever the elements are. Nothing is said to be lost of it.
#[test]
fn what_loses_nothing_sums_to_the_bits_of_exact_chunks() {
    for seed in 0..100 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let participants: u32 = random.random_range(2..=8);
        let elements = random.random_range(1..6000);
        let run = |codec| {
            let budget = Budget::Exact;
            assert!(budget.allows(codec));
            let terms = Terms { codec, finer: None, max_error: budget.max_error_of(codec), participants };
            let mut any = any_input(seed, elements);
            let part = Part::new(terms, &vec![1; participants as usize], elements, &mut |rank| {
                let mut values = any(rank);
                for (index, block) in values.chunks_mut(256).enumerate() {
                    match (index as u64 ^ seed ^ rank as u64) % 4 {
                        0 => {}
                        1 => block.fill(-0.0),
                        _ => block.fill(0.0),
                    }
                }
                if seed % 10 == 3 && rank == 1 {
                    values[elements / 2] = f32::NAN;
                }
                values
            });
            part.run(seed, seed % 2 == 0)
        };
        let (blocks, exact) = (run(Codec::NonzeroBlocks), run(Codec::EXACT));
        let bits = |outcome: &Outcome| outcome.values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&blocks), bits(&exact), "seed {seed}");
        assert_eq!((blocks.stated.relative(), blocks.measured, blocks.refused), (0.0, 0.0, 0));
        assert!(elements < 4000 || blocks.bytes < exact.bytes * 3 / 4, "seed {seed}: {}", blocks.bytes);
    }
}

#[test]
fn independent_errors_are_not_told_as_if_they_were_aligned() {
    let terms = Terms { codec: Codec::rotated(4), finer: None, max_error: None, participants: 8 };
    let part = Part::new(terms, &[1; 8], 1 << 15, &mut |rank| {
        let mut random = ChaCha8Rng::seed_from_u64(rank as u64);
        (0..1 << 15).map(|_| normal(&mut random)).collect()
    });
    let outcome = part.run(3, false);
    let (lost, told) = (part.error(&outcome, false), outcome.stated.error);
    assert!(lost < told && told < 1.6 * lost, "lost {lost}, told {told}");
    assert!(outcome.bytes < (1 << 15) * 4 * 8 / 7, "{} bytes", outcome.bytes);
}

/// What one encoding loses is not reckoned so often as there are participants.
#[test]
fn four_bits_keep_sums_within_a_fiftieth() {
    for (seed, participants) in (0..4).flat_map(|seed| (2..=4).map(move |participants| (seed, participants)))
    {
        let terms = Terms { codec: Codec::rotated(4), finer: None, max_error: Some(0.02), participants };
        for heavy in [false, true] {
            let part = Part::new(terms, &vec![1; participants as usize], 1 << 16, &mut |rank| {
                let mut random = ChaCha8Rng::seed_from_u64(seed << 8 | rank as u64);
                let mut tail = || if heavy { random.random_range(0.05..1.0_f32) } else { 1.0 };
                let tails: Vec<f32> = (0..1 << 16).map(|_| tail()).collect();
                tails.into_iter().map(|tail| normal(&mut random) / tail).collect()
            });
            let outcome = part.run(seed, false);
            let (lost, told) = (part.error(&outcome, false) / part.signal, outcome.stated.relative());
            let what = format!("seed {seed}, {participants} participants: lost {lost}, told {told}");
            assert!(outcome.refused == 0 && lost <= told && told <= 0.02, "{what}, {}", outcome.refused);
        }
    }
}

/// In one block, where chance is at its largest, and in a few; where tensors are alike, too.
#[test]
fn chance_does_not_pass_what_is_told_of_rotated_sums() {
    for seed in 0..600 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let elements = [1024, 1024, 2048, 4096][random.random_range(0..4)];
        let participants = random.random_range(2..=9);
        let codec = Codec::rotated(random.random_range(1..=4));
        let terms = Terms { codec, finer: None, max_error: None, participants };
        let mut any = any_input(seed, elements);
        let concentrated = random.random_bool(0.3);
        let part = Part::new(terms, &vec![1; participants as usize], elements, &mut |rank| {
            let mut values = any(rank);
            // All in one block, or nearly.
            values.iter_mut().skip(1024).filter(|_| concentrated).for_each(|value| *value *= 1e-3);
            values
        });
        let outcome = part.run(seed, false);
        let (lost, told) = (part.error(&outcome, false), outcome.stated.error);
        assert!(lost <= told, "seed {seed}: {codec:?} of {elements} at {participants}: {lost}, told {told}");
    }
}

#[test]
fn encoders_measure_what_is_lost_of_sums_of_different_tensors() {
    for (name, codec) in Codec::NAMED.iter().skip(1) {
        for participants in [2, 5, 8] {
            let (mut lost, mut measured, mut bound) = (0.0, 0.0, 0.0);
            for seed in 0..12 {
                let terms = Terms { codec: *codec, finer: None, max_error: None, participants };
                let part = Part::new(terms, &vec![1; participants as usize], 1 << 13, &mut |rank| {
                    let mut random = ChaCha8Rng::seed_from_u64(seed << 8 | rank as u64);
                    (0..1 << 13).map(|_| normal(&mut random) / random.random_range(0.05..1.0_f32)).collect()
                });
                for average in [false, true] {
                    let outcome = part.run(seed, average);
                    lost += part.error(&outcome, average);
                    measured += outcome.measured;
                    bound += outcome.stated.error;
                }
            }
            let what = format!("{name} at {participants}: lost {lost}, measured {measured}, at most {bound}");
            if *codec != Codec::NonzeroBlocks {
                assert!((0.95..1.05).contains(&(measured / lost)), "{what}");
                assert!(codec.is_unbiased() || bound > 1.3 * lost, "{what}");
            }
        }
    }
}

#[test]
fn what_is_not_finite_goes_exactly() {
    for (name, codec) in Codec::NAMED {
        for most in [None, Some(0.5)] {
            let terms = Terms { codec: *codec, finer: None, max_error: most, participants: 3 };
            let part = Part::new(terms, &[1, 1, 1], 600, &mut |rank| {
                let mut values = vec![rank as f32 - 0.7; 600];
                if rank == 2 {
                    (values[7], values[300]) = (f32::NAN, f32::INFINITY);
                }
                values
            });
            let outcome = part.run(1, false);
            let not_finite = (0..600).filter(|index| !outcome.values[*index].is_finite());
            assert_eq!(not_finite.collect::<Vec<_>>(), [7, 300], "{name}");
            assert!(outcome.values[7].is_nan() && outcome.values[300] == f32::INFINITY, "{name}");
            let exact = ["exact", "nonzero blocks"].contains(name);
            let expected = if exact { 0..=0 } else { 2..=if most.is_some() { 3 } else { 2 } };
            assert!(expected.contains(&outcome.refused), "{name}: {}", outcome.refused);
        }
    }
}

/// What is finite stays so, without any bound too. This holds where a code has no room for an element, or for
/// the sum.
#[test]
fn what_a_code_has_no_room_for_goes_exactly() {
    for (name, codec) in Codec::NAMED {
        for great in [3e4, 1e5, 1e30, f32::MAX] {
            for most in [None, Some(1.0)] {
                let terms = Terms { codec: *codec, finer: None, max_error: most, participants: 4 };
                let mut random = ChaCha8Rng::seed_from_u64(great.to_bits().into());
                let part = Part::new(terms, &[1; 4], 600, &mut |rank| {
                    let mut values: Vec<f32> = (0..600).map(|_| normal(&mut random)).collect();
                    // No contribution is beyond a half, but the sum is; or one rank's is, in a whole row and in the rest.
                    match rank {
                        _ if great == 3e4 => values[9] = great,
                        2 => (values[9], values[599]) = (great, -great),
                        _ => {}
                    }
                    values
                });
                for average in [false, true] {
                    let outcome = part.run(1, average);
                    let what = format!("{name} of {great:e} within {most:?}, average {average}");
                    assert!(outcome.values.iter().all(|value| value.is_finite()), "{what}");
                    assert!(outcome.stated.error.is_finite(), "{what}: {:?}", outcome.stated);
                    let (lost, told) = (part.error(&outcome, average), outcome.stated.error);
                    // Beside that, sums in f32 round.
                    let lost = (lost.sqrt() - 2e-6 * part.signal.sqrt()).max(0.0).powi(2);
                    assert!(lost <= told, "{what}: lost {lost}, told {told}");
                    // An average of four is again a half's.
                    let full = *name == "fp16" && !(average && great == 3e4);
                    assert!(!full || outcome.refused > 0, "{what}");
                    // Scales reach as far as floats do.
                    let scaled = *name == "int8" && great < 1e38;
                    assert!(!scaled || outcome.refused == 0, "{what}: {}", outcome.refused);
                }
            }
        }
    }
}

/// Elements whose norm no float holds: what a rotated block then says of its error is no measure.
#[test]
fn what_has_no_norm_goes_exactly() {
    for (name, codec) in Codec::NAMED {
        let terms = Terms { codec: *codec, finer: None, max_error: None, participants: 2 };
        let part = Part::new(terms, &[1; 2], 2048, &mut |rank| {
            (0..2048).map(|index| if (index * 7 + rank) % 3 == 0 { 1e38 } else { -1.5e38 }).collect()
        });
        let outcome = part.run(1, false);
        assert!(outcome.values.iter().all(|value| value.is_finite()), "{name}");
        let (lost, told) = (part.error(&outcome, false).sqrt(), outcome.stated.error.sqrt());
        assert!(lost <= told + 2e-6 * part.signal.sqrt(), "{name}: lost {lost:e}, told {told:e}");
    }
}

#[test]
fn a_slot_for_exact_elements_fits_any_chunk() {
    for (name, codec) in Codec::NAMED {
        for elements in (1..600).chain([1023, 1024, 1025, 4095, 4097, 32768]) {
            let most = codec.max_bytes(elements).unwrap();
            assert!(most <= 4 * elements + 128, "{name}: {most} bytes of {elements} elements");
        }
    }
}

#[test]
fn what_was_not_agreed_on_is_refused() {
    let terms = |codec| Terms { codec, finer: None, max_error: None, participants: 2 };
    let values = vec![1.5_f32; 300];
    let mut chunk = vec![0; 1400];
    let to = ViewMut::from(&mut chunk[..]);
    let (from, sender) = (View::from(&values[..]), terms(Codec::BF16));
    let coded = whole(|passes| sender.contribute(passes, 1, 1, from, to)).unwrap();
    let chunk = &mut chunk[..coded.bytes];
    let mut sum = vec![1.0_f32; 300];
    let mine = terms(Codec::INT8);
    let mut sums = whole(|passes| mine.begin(passes, 1, View::from(&sum[..]))).unwrap();
    let before = sums;
    let (from, to) = (View::from(&*chunk), ViewMut::from(&mut sum[..]));
    let error = whole(|passes| mine.add(passes, &mut sums, from, to)).unwrap_err();
    assert_eq!(error, CodecError::NotAgreed { given: Codec::BF16 });
    for cut in [0, 7, HEADER_BYTES, chunk.len() - 1] {
        let (from, to) = (View::from(&chunk[..cut]), ViewMut::from(&mut sum[..]));
        let error = whole(|passes| sender.take(passes, from, to));
        assert!(matches!(error, Err(CodecError::Short { .. })), "{cut}: {error:?}");
    }
    let (from, to) = (View::from(&*chunk), ViewMut::from(&mut sum[..299]));
    let error = whole(|passes| sender.take(passes, from, to)).unwrap_err();
    assert_eq!(error, CodecError::Elements { expected: 299, given: 300 });
    assert!(sum.iter().all(|value| *value == 1.0) && sums == before, "nothing was written");
    // What it says of its squares may be anything.
    for squares in [(f64::NAN, 1.0), (f64::INFINITY, 0.0), (1e300, 1e-300)] {
        state(Squares { error: squares.0, signal: squares.1 }, 1.0, ViewMut::from(&mut *chunk)).unwrap();
        let Header { elements, .. } = header(View::from(&*chunk)).unwrap();
        assert_eq!(elements, 300);
        let terms = Terms { max_error: Some(0.1), ..terms(Codec::BF16) };
        let mut sums = whole(|passes| terms.begin(passes, 1, View::from(&sum[..]))).unwrap();
        let (from, to) = (View::from(&*chunk), ViewMut::from(&mut sum[..]));
        whole(|passes| terms.add(passes, &mut sums, from, to)).unwrap();
        let mut result = vec![0; 1400];
        let (from, to) = (View::from(&sum[..]), ViewMut::from(&mut result[..]));
        let coded = whole(|passes| terms.conclude(passes, &sums, None, 1, from, to)).unwrap();
        let told = coded.squares.relative();
        assert!(coded.refused && (told.is_nan() || told > 0.1), "{coded:?}");
    }
}
