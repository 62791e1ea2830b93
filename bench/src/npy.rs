//! Arrays of f32 as files of NumPy, version 1.0 of its format (NEP 1).

use anyhow::{Context, Result};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// A header is padded to a multiple of so many bytes, with what stands before it.
const ALIGNED: usize = 64;

/// Writes `values` as an array of one dimension.
///
/// # Errors
/// Where the file cannot be written.
pub fn write(path: &Path, values: &[f32]) -> Result<()> {
    let named = || format!("cannot write {}", path.display());
    let mut file = BufWriter::new(File::create(path).with_context(named)?);
    file.write_all(&head(values.len())).with_context(named)?;
    for value in values {
        file.write_all(&value.to_le_bytes()).with_context(named)?;
    }
    file.flush().with_context(named)
}

/// What stands before the elements.
fn head(elements: usize) -> Vec<u8> {
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    let words = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({elements},), }}");
    // Two bytes tell the length, and a line's end closes it.
    let before = bytes.len() + size_of::<u16>();
    let length = (before + words.len() + 1).next_multiple_of(ALIGNED) - before;
    // Less than a hundred, however many elements there are.
    bytes.extend((length as u16).to_le_bytes());
    bytes.extend(words.bytes());
    bytes.resize(before + length - 1, b' ');
    bytes.push(b'\n');
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_what_the_format_says() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.npy");
        write(&path, &[1.5, -0.0, f32::NAN]).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes[..10], *b"\x93NUMPY\x01\x00\x76\x00");
        let (head, data) = bytes[10..].split_at(0x76);
        assert_eq!((10 + head.len()) % 64, 0);
        let text = std::str::from_utf8(head).unwrap();
        assert_eq!(text.trim_end(), "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }");
        assert!(text.ends_with(" \n"));
        let values: Vec<u32> =
            data.chunks(4).map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap())).collect();
        assert_eq!(values, [1.5_f32, -0.0, f32::NAN].map(f32::to_bits));
        for elements in [0, 9, 1 << 20, usize::MAX] {
            assert_eq!(super::head(elements).len() % 64, 0);
        }
        assert!(write(&folder.path().join("no/such"), &[]).is_err());
    }
}
