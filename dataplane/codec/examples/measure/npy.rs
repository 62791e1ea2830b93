//! Float32 arrays in NumPy's format, versions 1 to 3 (NEP 1).

use anyhow::{Context, Result, bail};

/// The elements of an array of little-endian float32 in C order, of any shape.
pub(crate) fn floats(bytes: &[u8]) -> Result<Vec<f32>> {
    let rest = bytes.strip_prefix(b"\x93NUMPY").context("this is no file of NumPy")?;
    let (length, at) = match rest {
        [1, _, a, b, ..] => (usize::from(u16::from_le_bytes([*a, *b])), 4),
        [2 | 3, _, a, b, c, d, ..] => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, 6),
        _ => bail!("an unknown version of NumPy's format"),
    };
    let head = rest.get(at..at + length).context("the file ends within its header")?;
    let head: String = String::from_utf8_lossy(head).split_whitespace().collect();
    if !head.contains("'descr':'<f4'") {
        bail!("not little-endian float32: {head}");
    }
    if !head.contains("'fortran_order':False") {
        bail!("not in C order: {head}");
    }
    let data = rest.get(at + length..).unwrap_or_default();
    let floats = data.chunks_exact(4).map(|bytes| match bytes {
        [a, b, c, d] => f32::from_le_bytes([*a, *b, *c, *d]),
        _ => 0.0,
    });
    Ok(floats.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_numpy_is_read() {
        let head = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n";
        let mut file = b"\x93NUMPY\x01\x00".to_vec();
        file.extend((head.len() as u16).to_le_bytes());
        file.extend(head.bytes());
        file.extend([1.5_f32, -2.0].into_iter().flat_map(f32::to_le_bytes));
        assert_eq!(floats(&file).unwrap(), [1.5, -2.0]);
        for cut in 0..file.len() - 8 {
            assert!(floats(&file[..cut]).is_err());
        }
        let doubles = String::from_utf8_lossy(&file).replace("<f4", "<f8");
        assert!(floats(doubles.as_bytes()).is_err());
    }
}
