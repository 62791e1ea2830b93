//! Chunks from any bytes, and tensors of any floats: a defined result, never a panic.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use harmonaize_abi::{View, ViewMut};
use harmonaize_codec::{
    Code, Codec, CodecError, Grid, Header, Rounding, Squares, Store, decode, encode, header, state,
};
use proptest::prelude::*;

fn codec() -> impl Strategy<Value = Codec> {
    let grid = proptest::sample::select(vec![Grid::Int8, Grid::Int4]);
    let rounding = proptest::sample::select(vec![Rounding::Nearest, Rounding::Stochastic]);
    prop_oneof![
        Just(Codec::EXACT),
        Just(Codec::BF16),
        Just(Codec::Fixed(Code::F16)),
        (grid, 5..=8_u32, rounding).prop_map(|(grid, power, rounding)| Codec::Fixed(Code::Blocks {
            grid,
            block: 1 << power,
            rounding
        })),
        (1..=4_usize, 6..=12_u32)
            .prop_map(|(bits, power)| Codec::Fixed(Code::Rotated { bits, block: 1 << power })),
        Just(Codec::NonzeroBlocks),
    ]
}

fn float() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => -1.0..1.0_f32,
        1 => any::<u32>().prop_map(f32::from_bits),
        1 => proptest::sample::select(vec![0.0, -0.0, f32::MAX, f32::MIN_POSITIVE, 1e-45, f32::NAN, f32::INFINITY]),
    ]
}

fn chunk(codec: Codec, seed: u64, tensor: &[f32]) -> Vec<u8> {
    let mut chunk = vec![0xa5; codec.max_bytes(tensor.len()).unwrap()];
    let encoded = encode(codec, seed, View::from(tensor), ViewMut::from(&mut chunk[..])).unwrap();
    chunk.truncate(encoded.bytes);
    chunk
}

fn values(chunk: &[u8], elements: usize) -> Result<Vec<f32>, CodecError> {
    let mut values = vec![7.0; elements];
    decode(View::from(chunk), Store::Set, ViewMut::from(&mut values[..])).map(|_| values)
}

#[test]
fn a_header_is_what_its_table_says() {
    let codec = Codec::Fixed(Code::Blocks { grid: Grid::Int8, block: 64, rounding: Rounding::Stochastic });
    let squares = Squares { error: 0.25, signal: 2.0 };
    let header =
        Header { codec, payload: 0x54, elements: 80, seed: 0x0807_0605_0403_0201, squares, measured: 1.0 };
    let bytes = header.to_bytes();
    assert_eq!(
        bytes[..28],
        [0x68, 0x7a, 1, 3, 8, 6, 1, 0, 0, 0, 0x80, 0x3f, 0x54, 0, 0, 0, 80, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    );
    assert_eq!(bytes[28..44], [0, 0, 0, 0, 0, 0, 0xd0, 0x3f, 0, 0, 0, 0, 0, 0, 0, 0x40]);
    assert_eq!(Header::from_bytes(&bytes), Err(CodecError::Payload));
    let header = Header { payload: 64 + 16 + 8, ..header };
    assert_eq!(Header::from_bytes(&header.to_bytes()), Ok(header));
    let negative = Header { squares: Squares { error: -1.0, signal: 2.0 }, ..header };
    assert_eq!(Header::from_bytes(&negative.to_bytes()), Err(CodecError::Payload));
    // What was measured is a part of the bound.
    let bound = Header { measured: 0.25, ..header }.to_bytes();
    assert_eq!(bound[8..12], 0.25_f32.to_le_bytes());
    assert_eq!(Header::from_bytes(&bound), Ok(Header { measured: 0.25, ..header }));
    let negative = Header { measured: -0.25, ..header };
    assert_eq!(Header::from_bytes(&negative.to_bytes()), Err(CodecError::Payload));
    let mut damaged = header.to_bytes();
    damaged[20] ^= 1;
    assert_eq!(Header::from_bytes(&damaged), Err(CodecError::Damaged));
    damaged[2] = 9;
    assert_eq!(Header::from_bytes(&damaged), Err(CodecError::Version { version: 9 }));
    damaged[0] = 0;
    assert_eq!(Header::from_bytes(&damaged), Err(CodecError::Magic { found: 0x7a00 }));
}

#[test]
fn a_chunk_states_what_its_encoder_lost_or_was_told() {
    let tensor = [0.1, -0.7, 3.0];
    let mut bytes = vec![0; Codec::BF16.max_bytes(3).unwrap()];
    let told = encode(Codec::BF16, 0, View::from(&tensor[..]), ViewMut::from(&mut bytes[..])).unwrap();
    assert_eq!(header(View::from(&bytes[..])).unwrap().squares, told.squares);
    let before = values(&bytes, 3).unwrap();
    let more = Squares { error: 7.0, signal: 9.0 };
    state(more, 1.0, ViewMut::from(&mut bytes[..])).unwrap();
    assert_eq!(header(View::from(&bytes[..])).unwrap().squares, more);
    assert_eq!(values(&bytes, 3).unwrap(), before);
    assert!(state(more, 1.0, ViewMut::from(&mut bytes[..20])).is_err());
}

#[test]
fn bad_numbers_have_defined_results() {
    let blocks = Codec::INT8;
    let rotated = Codec::Fixed(Code::Rotated { bits: 4, block: 64 });
    for codec in [blocks, rotated] {
        // A NaN, or an infinity, is a NaN of its whole block, and of no other.
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut tensor = vec![1.0; 600];
            tensor[3] = bad;
            let back = values(&chunk(codec, 1, &tensor), 600).unwrap();
            let block = if codec == blocks { 256 } else { 64 };
            assert!(back[..block].iter().all(|value| value.to_bits() == 0x7fc0_0000), "{codec:?} of {bad}");
            assert!(back[block..].iter().all(|value| (value - 1.0).abs() < 0.6), "{codec:?} of {bad}");
        }
    }
    assert_eq!(values(&chunk(blocks, 1, &[f32::MAX, 1.0]), 2).unwrap()[1], 0.0);
    assert!(values(&chunk(blocks, 1, &[f32::MAX; 2]), 2).unwrap()[0] > 3.4e38);
    let mut told = vec![0; 1000];
    let nan = encode(blocks, 1, View::from(&[f32::NAN][..]), ViewMut::from(&mut told[..])).unwrap();
    assert!(nan.squares.error.is_nan() && nan.squares.signal.is_nan());
}

#[test]
fn the_least_and_the_greatest_have_defined_results() {
    for (name, codec) in Codec::NAMED {
        let back = |tensor: &[f32]| values(&chunk(*codec, 1, tensor), tensor.len()).unwrap();
        assert!(back(&[]).is_empty(), "{name}");
        for elements in [1, 70, 1300] {
            assert!(back(&vec![0.0; elements]).iter().all(|value| *value == 0.0), "{name}: zeros stay");
            // What is denormal becomes 0, or about what it was.
            let least = back(&vec![1e-40; elements]);
            assert!(least.iter().all(|value| (0.0..=1.1e-40).contains(value)), "{name}: {:?}", least[0]);
            // The greatest is about what it was, or left out, or infinite of the same sign or NaN where the encoder says so.
            let tensor: Vec<f32> =
                (0..elements).map(|index| if index % 2 == 0 { f32::MAX } else { -f32::MAX }).collect();
            let mut bytes = vec![0; codec.max_bytes(elements).unwrap()];
            let to = ViewMut::from(&mut bytes[..]);
            let told = encode(*codec, 1, View::from(&tensor[..]), to).unwrap().squares;
            let rotated = matches!(codec, Codec::Fixed(Code::Rotated { .. }));
            for (value, back) in tensor.iter().zip(values(&bytes, elements).unwrap()) {
                assert_eq!(back.is_nan(), rotated, "{name}: {back} of {value}");
                assert!(back.is_finite() || told.error.is_nan(), "{name}: {back} of {value}");
                assert!(
                    rotated || back == 0.0 || (back > 0.0) == (*value > 0.0),
                    "{name}: {back} of {value}"
                );
            }
        }
        let one = back(&[-2.5]);
        assert!((one[0] + 2.5).abs() < 0.5, "{name}: {one:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn any_tensor_comes_back_as_long_as_it_was(
        codec in codec(), seed: u64, tensor in proptest::collection::vec(float(), 0..3000),
    ) {
        let chunk = chunk(codec, seed, &tensor);
        let back = values(&chunk, tensor.len()).unwrap();
        for (value, back) in tensor.iter().zip(&back) {
            prop_assert!(!value.is_nan() || back.is_nan(), "{codec:?} hides a NaN");
            prop_assert!(value.is_finite() || !back.is_finite(), "{codec:?} hides an infinity");
        }
        if codec == Codec::EXACT {
            prop_assert!(tensor.iter().zip(&back).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
        let other = values(&chunk, tensor.len() + 1).unwrap_err();
        prop_assert_eq!(other, CodecError::Elements { expected: tensor.len() + 1, given: tensor.len() as u64 });
        let cut = values(&chunk[..chunk.len() - 1], tensor.len()).unwrap_err();
        let short = matches!(cut, CodecError::Short { .. });
        prop_assert!(short, "{cut}");
    }

    #[test]
    fn any_bytes_are_refused_or_decoded(bytes in proptest::collection::vec(any::<u8>(), 0..200), elements in 0..100_usize) {
        let _ = values(&bytes, elements);
    }
}
