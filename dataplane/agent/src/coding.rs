//! Compressed tensors between this agent and control: what tenants let be lost, and what encoding takes here.

use harmonaize_abi::session::Budget;
use harmonaize_abi::{View, ViewMut};
use harmonaize_api::v1;
use harmonaize_codec::{Codec, Store, decode, encode};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Elements on which codecs are measured: 128 KiB.
const ELEMENTS: usize = 1 << 15;
/// How often each is; the shortest time counts.
const TIMES: usize = 3;

/// A tenant's budget as control takes it; none is exact.
pub(crate) fn to_control(budget: &Budget) -> Option<v1::Budget> {
    (*budget != Budget::Exact).then(|| budget.into())
}

/// The codecs that this agent takes, with what one core needs for each. The first call measures that, in a few
/// milliseconds.
pub fn codecs() -> &'static [v1::CodecSpeed] {
    static CODECS: OnceLock<Vec<v1::CodecSpeed>> = OnceLock::new();
    CODECS.get_or_init(|| {
        // Values of either sign over three powers of ten, so that blocks differ.
        let tensor: Vec<f32> =
            (0..ELEMENTS).map(|i| (i as f32 * 0.7).sin() * (1.0 + (i % 1000) as f32)).collect();
        let mut sum = vec![0.0; ELEMENTS];
        let coded = Codec::NAMED.iter().filter(|(_, codec)| *codec != Codec::EXACT);
        coded.filter_map(|(name, codec)| speed(name, *codec, &tensor, &mut sum)).collect()
    })
}

/// What a codec takes; none where it cannot be used here.
fn speed(name: &str, codec: Codec, tensor: &[f32], sum: &mut [f32]) -> Option<v1::CodecSpeed> {
    let mut chunk = vec![0_u8; codec.max_bytes(tensor.len())?];
    let (mut encoding, mut decoding) = (Duration::MAX, Duration::MAX);
    for seed in 0..TIMES as u64 {
        let begun = Instant::now();
        encode(codec, seed, View::from(tensor), ViewMut::from(&mut chunk[..])).ok()?;
        encoding = encoding.min(begun.elapsed());
        let begun = Instant::now();
        decode(View::from(&chunk[..]), Store::Add, ViewMut::from(&mut *sum)).ok()?;
        decoding = decoding.min(begun.elapsed());
    }
    let rate = |time: Duration| (size_of_val(tensor) as f64 / time.as_secs_f64().max(1e-9)) as u64;
    Some(v1::CodecSpeed { codec: name.to_owned(), encode: rate(encoding), decode: rate(decoding) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_codec_but_exact_is_told_with_its_speeds() {
        let told: Vec<&str> = codecs().iter().map(|speed| speed.codec.as_str()).collect();
        let named: Vec<&str> = Codec::NAMED.iter().skip(1).map(|(name, _)| *name).collect();
        assert_eq!(told, named);
        assert!(codecs().iter().all(|speed| speed.encode > 0 && speed.decode > 0), "{:?}", codecs());
    }
}
