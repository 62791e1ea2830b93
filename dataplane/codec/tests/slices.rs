//! Coded steps that are left between two parts and gone on with give the bits of those that are not, for every codec, of random
//! sizes. Where they are never gone on with, what is owed is what it was. `HARMONAIZE_SEED` runs one seed.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // tests alone

use harmonaize_abi::{Dtype, ReduceOp, View, ViewMut};
use harmonaize_codec::{
    Codec, CodecError, Coded, Cursor, ErrorFeedback, HEADER_BYTES, Load, PART, Passes, Store, Terms, decode,
    header,
};
use harmonaize_kernels::reduce;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// When turns are over.
enum Turns {
    Never,
    /// Before each part but a turn's first, by chance.
    Random(Box<ChaCha8Rng>),
}

impl Turns {
    /// Runs a step, turn after turn, and counts its turns.
    fn drive<T>(
        &mut self,
        turns: &mut usize,
        mut step: impl FnMut(&mut Passes<'_>) -> Result<Option<T>, CodecError>,
    ) -> T {
        let mut cursor = Cursor::default();
        loop {
            let mut parts = 0;
            let mut ends = |load: Load| {
                assert!(load.bytes > 0 && load.copied >= load.bytes && load.bytes <= 3 * 4 * PART);
                parts += 1;
                match &mut *self {
                    Self::Never => false,
                    Self::Random(random) => parts > 1 && random.random_bool(0.6),
                }
            };
            let mut passes = Passes::resume(cursor, &mut ends);
            let done = step(&mut passes).unwrap();
            cursor = passes.cursor();
            *turns += 1;
            if let Some(done) = done {
                return done;
            }
        }
    }
}

/// What a participant and an owner make of a tensor.
struct Outcome {
    chunks: [Vec<u8>; 2],
    residuals: [Vec<u32>; 2],
    values: Vec<u32>,
    /// What is told of it, with each number's digits. One that is none is not equal to itself.
    summary: String,
}

struct Case {
    terms: Terms,
    average: bool,
    own: [Vec<f32>; 2],
    /// What both owe before; none: they have no feedback.
    residuals: Option<[Vec<f32>; 2]>,
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn tensor(random: &mut ChaCha8Rng, elements: usize) -> Vec<f32> {
    let (odd, sparse) = (random.random_bool(0.1), random.random_bool(0.4));
    let mut values = Vec::with_capacity(elements);
    while values.len() < elements {
        let zero = sparse && random.random_bool(0.5);
        let mut one = || random.random_range(-1.0..1.0_f32) / random.random_range(0.05..1.0_f32);
        let some = (elements - values.len()).min(256);
        values.extend((0..some).map(|_| if zero { 0.0 } else { one() }));
    }
    if odd {
        values[elements / 2] = f32::INFINITY;
    }
    values
}

impl Case {
    fn new(codec: Codec, random: &mut ChaCha8Rng) -> Self {
        // Less than a part, whole parts, and any.
        let elements = match random.random_range(0..4) {
            0 => random.random_range(1..PART),
            1 => PART * random.random_range(1..=3_usize),
            _ => random.random_range(PART + 1..5 * PART),
        };
        let finer =
            random.random_bool(0.5).then(|| Codec::NAMED[random.random_range(0..Codec::NAMED.len())].1);
        let max_error = [None, Some(1e-6), Some(0.02)][random.random_range(0..3)];
        let terms = Terms { codec, finer, max_error, participants: 2 };
        let own = [0; 2].map(|_| tensor(random, elements));
        let feedback = random.random_bool(0.6);
        let residuals =
            feedback.then(|| [0; 2].map(|_| tensor(random, elements).iter().map(|v| v / 64.0).collect()));
        Self { terms, average: random.random_bool(0.5), own, residuals }
    }

    fn elements(&self) -> usize {
        self.own[0].len()
    }

    /// A step that encodes a contribution into `chunk`. What stays owed goes into `left_out`.
    fn contribution<'a>(
        &'a self,
        chunk: ViewMut<'a>,
        remainder: &'a mut [f32],
    ) -> impl FnMut(&mut Passes<'_>) -> Result<Option<Coded>, CodecError> + 'a {
        let own = View::from(&self.own[1][..]);
        let account = self.residuals.as_ref().map(|residuals| ErrorFeedback {
            residual_in: View::from(&residuals[1][..]),
            residual_out: ViewMut::from(remainder),
        });
        move |passes: &mut Passes<'_>| {
            let Some(account) = account else { return self.terms.contribute(passes, 1, 7, own, chunk) };
            let Some(owing) = account.contribution(passes, own)? else { return Ok(None) };
            let Some(coded) = self.terms.contribute(passes, 1, 7, owing, chunk)? else { return Ok(None) };
            Ok(account.record_contribution(passes, &coded, chunk.as_view())?.map(|()| coded))
        }
    }

    /// A contribution, the owner's sum, its chunk, and what is read of it; also in how many turns.
    fn run(&self, mut turns: Turns) -> (Outcome, usize) {
        let (mut count, room) = (0, 4 * self.elements() + 128);
        let mut chunks = [0; 2].map(|_| vec![0xa5_u8; room]);
        let mut remainder = [0; 2].map(|_| vec![7.0_f32; self.elements()]);
        let [first, second] = &mut chunks;
        let [owners, others] = &mut remainder;
        let chunk = ViewMut::from(&mut first[..]);
        let contributed = turns.drive(&mut count, self.contribution(chunk, &mut others[..]));
        let mut sum = self.own[0].clone();
        let to = ViewMut::from(&mut sum[..]);
        let account = self.residuals.as_ref().map(|residuals| ErrorFeedback {
            residual_in: View::from(&residuals[0][..]),
            residual_out: ViewMut::from(&mut owners[..]),
        });
        let from = chunk.as_view();
        let (sums, added) = turns.drive(&mut count, |passes| {
            if let Some(account) = account
                && account.begin(passes, to)?.is_none()
            {
                return Ok(None);
            }
            let Some(mut sums) = self.terms.begin(passes, 1, to.as_view())? else { return Ok(None) };
            let Some(added) = self.terms.add(passes, &mut sums, from, to)? else { return Ok(None) };
            let completed = account.map_or(Ok(Some(())), |account| account.complete(passes, to.as_view()))?;
            Ok(completed.map(|()| (sums, added)))
        });
        let average_of = self.average.then_some(2);
        if self.average {
            reduce(ReduceOp::Average, Dtype::F32, &[to.as_view()], &[to], average_of).unwrap();
        }
        let chunk = ViewMut::from(&mut second[..]);
        let concluded = turns.drive(&mut count, |passes| {
            let coded = self.terms.conclude(passes, &sums, average_of, 9, to.as_view(), chunk)?;
            let (Some(coded), Some(account)) = (coded, account) else { return Ok(coded) };
            Ok(account.record_result(passes, &coded, average_of, chunk.as_view())?.map(|()| coded))
        });
        let taken = turns.drive(&mut count, |passes| self.terms.take(passes, chunk.as_view(), to));
        let coded = [contributed, added, concluded, taken];
        let residuals = remainder.map(|residuals| bits(&residuals));
        (Outcome { chunks, residuals, values: bits(&sum), summary: format!("{sums:?} {coded:?}") }, count)
    }
}

fn seeds(count: u64) -> Vec<u64> {
    let one = std::env::var("HARMONAIZE_SEED").ok().map(|seed| seed.parse().unwrap());
    one.map_or_else(|| (0..count).collect(), |seed| vec![seed])
}

#[test]
fn steps_in_slices_give_the_bits_of_whole_ones() {
    for seed in seeds(6) {
        let mut most = 0;
        for (index, (name, codec)) in Codec::NAMED.iter().enumerate() {
            let mut random = ChaCha8Rng::seed_from_u64(seed << 8 | index as u64);
            let case = Case::new(*codec, &mut random);
            let (whole, steps) = case.run(Turns::Never);
            let (sliced, turns) = case.run(Turns::Random(Box::new(random)));
            let what = format!("seed {seed}: {name} of {} elements, {turns} turns", case.elements());
            assert_eq!(steps, 4, "{what}");
            most = most.max(turns);
            assert!(whole.chunks == sliced.chunks, "{what}: other chunks");
            assert!(whole.residuals == sliced.residuals, "{what}: other debts");
            assert!(whole.values == sliced.values, "{what}: other values");
            assert_eq!(whole.summary, sliced.summary, "{what}");
        }
        assert!(most > 10, "seed {seed}: {most} turns at most");
    }
}

/// A step may be left for good after any part. Then it can be begun anew, as if nothing had been.
#[test]
fn a_step_that_is_left_for_good_owes_what_was_owed() {
    for seed in seeds(3) {
        for (index, (name, codec)) in Codec::NAMED.iter().enumerate() {
            let mut random = ChaCha8Rng::seed_from_u64(seed << 8 | index as u64);
            let elements = random.random_range(PART + 1..3 * PART);
            let own = [0; 2].map(|_| tensor(&mut random, elements));
            let residuals = Some([0; 2].map(|_| tensor(&mut random, elements)));
            let terms = Terms { codec: *codec, finer: None, max_error: None, participants: 2 };
            let case = Case { terms, average: false, own, residuals };
            let (before, what) =
                (case.residuals.clone(), format!("seed {seed}: {name} of {elements} elements"));
            let (whole, _) = case.run(Turns::Never);
            let mut chunk = vec![0_u8; 4 * elements + 128];
            let mut remainder = vec![7.0_f32; elements];
            let mut left = 0;
            loop {
                // The step is left after so many parts of all its passes, and one.
                let mut parts = 0;
                let mut ends = |_: Load| {
                    parts += 1;
                    parts > left + 1
                };
                let mut step = case.contribution(ViewMut::from(&mut chunk[..]), &mut remainder);
                let mut passes = Passes::resume(Cursor::default(), &mut ends);
                let over = step(&mut passes).unwrap().is_none();
                // Whatever it came to, it is done once more from its beginning.
                Turns::Never.drive(&mut 0, step);
                let used = HEADER_BYTES + header(View::from(&chunk[..])).unwrap().payload as usize;
                assert!(chunk[..used] == whole.chunks[0][..used], "{what}: left after {left} parts");
                assert!(bits(&remainder) == whole.residuals[1], "{what}: left after {left} parts");
                let kept = case.residuals.iter().flatten().zip(before.iter().flatten());
                assert!(kept.clone().all(|(now, then)| bits(now) == bits(then)), "{what}: it was written");
                left += 1;
                if !over {
                    break;
                }
            }
            assert!(left > 4, "{what}: {left} parts");
        }
    }
}

/// Who sends a chunk cannot change what it says of itself while it is read.
#[test]
fn a_header_is_read_once() {
    let elements = 3 * PART;
    let values: Vec<f32> = (0..elements).map(|at| (at % 100) as f32).collect();
    let terms = |codec| Terms { codec, finer: None, max_error: None, participants: 2 };
    let mut chunk = vec![0_u8; 4 * elements + 128];
    let to = ViewMut::from(&mut chunk[..]);
    let coded = Turns::Never
        .drive(&mut 0, |passes| terms(Codec::INT8).contribute(passes, 1, 1, View::from(&values[..]), to));
    let mut expected = vec![0.0_f32; elements];
    decode(to.as_view(), Store::Set, ViewMut::from(&mut expected[..])).unwrap();
    let (mut found, mut cursor, mut turns) = (vec![0.0_f32; elements], Cursor::default(), 0);
    let taken = loop {
        let mut parts = 0;
        let mut ends = |_: Load| {
            parts += 1;
            parts > 1
        };
        let mut passes = Passes::resume(cursor, &mut ends);
        let from = View::from(&chunk[..]);
        let taken = terms(Codec::INT8).take(&mut passes, from, ViewMut::from(&mut found[..])).unwrap();
        cursor = passes.cursor();
        turns += 1;
        if let Some(taken) = taken {
            break taken;
        }
        // Other elements, and no chunk at all.
        chunk[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
    };
    assert_eq!((turns, taken.bytes, bits(&found)), (3, coded.bytes, bits(&expected)));
}
