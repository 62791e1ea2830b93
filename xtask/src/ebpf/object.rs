//! Takes out of an object what the kernel's loader does not read: DWARF, and relocations of the type information.

use anyhow::{Context, Result, ensure};
use harmonaize_testkit::workspace;
use std::path::Path;

/// Bytes of an ELF header, and of a section's.
const HEADER: usize = 64;
const SECTION: usize = 64;

/// Where the offset of the table of sections lies in an ELF header.
const SECTIONS_AT: usize = 0x28;
/// Where the number of sections lies there.
const COUNT_AT: usize = 0x3c;
/// Where the index of the section of names lies there.
const NAMES_AT: usize = 0x3e;
/// Where the kind of a section lies in its header.
const KIND: usize = 0x04;
const OFFSET: usize = 0x18;
const SIZE: usize = 0x20;
const ALIGNMENT: usize = 0x30;

/// A section without bytes in the file.
const NO_BITS: u32 = 8;

/// Writes what is loaded of a linked object into a folder, unless it names a path of this machine.
pub(super) fn put(name: &str, linked: &[u8], into: &Path) -> Result<()> {
    let stripped = strip(linked).with_context(|| format!("{name} is no usable object"))?;
    let root = workspace::root();
    let text = String::from_utf8_lossy(&stripped);
    ensure!(
        !text.contains(&*root.to_string_lossy()),
        "{name} names the path of this tree, {}",
        root.display()
    );
    std::fs::write(into.join(format!("{name}.o")), stripped)?;
    Ok(())
}

/// The object with only what is loaded. Sections keep their numbers; those taken out are empty.
pub(super) fn strip(object: &[u8]) -> Result<Vec<u8>> {
    ensure!(object.starts_with(b"\x7fELF\x02\x01"), "not a little-endian ELF file of 64 bits");
    let sections = usize::try_from(word64(object, SECTIONS_AT)?)?;
    let count = usize::from(word16(object, COUNT_AT)?);
    let header = |index: usize| -> Result<&[u8]> {
        let at = index.checked_mul(SECTION).and_then(|at| sections.checked_add(at));
        let header = at.and_then(|at| object.get(at..)?.get(..SECTION));
        header.context("a section's header lies beyond the end")
    };
    let names = contents(object, header(usize::from(word16(object, NAMES_AT)?))?)?;
    let mut stripped = object.get(..HEADER).context("the header is cut short")?.to_vec();
    let mut headers = Vec::new();
    for index in 0..count {
        let mut own = header(index)?.to_vec();
        let name = names.get(word32(&own, 0)? as usize..).unwrap_or_default();
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        if unread(name) {
            own.fill(0);
        } else if word32(&own, KIND)? != 0 && word32(&own, KIND)? != NO_BITS {
            let bytes = contents(object, &own)?;
            let alignment = usize::try_from(word64(&own, ALIGNMENT)?)?.clamp(1, 4096);
            stripped.resize(stripped.len().next_multiple_of(alignment), 0);
            set(&mut own, OFFSET, stripped.len() as u64)?;
            stripped.extend_from_slice(bytes);
        }
        headers.extend(own);
    }
    stripped.resize(stripped.len().next_multiple_of(8), 0);
    let at = stripped.len() as u64;
    set(&mut stripped, SECTIONS_AT, at)?;
    stripped.extend(headers);
    Ok(stripped)
}

fn unread(name: &[u8]) -> bool {
    name.starts_with(b".debug_")
        || name.starts_with(b".rel.debug_")
        || name == b".llvm_addrsig"
        || name.starts_with(b".rel.BTF")
}

fn contents<'a>(object: &'a [u8], header: &[u8]) -> Result<&'a [u8]> {
    let (at, size) = (usize::try_from(word64(header, OFFSET)?)?, usize::try_from(word64(header, SIZE)?)?);
    object.get(at..).and_then(|rest| rest.get(..size)).context("a section lies beyond the end")
}

fn word16(bytes: &[u8], at: usize) -> Result<u16> {
    let word = bytes.get(at..).and_then(|rest| rest.first_chunk()).context("cut short")?;
    Ok(u16::from_le_bytes(*word))
}

fn word32(bytes: &[u8], at: usize) -> Result<u32> {
    let word = bytes.get(at..).and_then(|rest| rest.first_chunk()).context("cut short")?;
    Ok(u32::from_le_bytes(*word))
}

fn word64(bytes: &[u8], at: usize) -> Result<u64> {
    let word = bytes.get(at..).and_then(|rest| rest.first_chunk()).context("cut short")?;
    Ok(u64::from_le_bytes(*word))
}

fn set(bytes: &mut [u8], at: usize, value: u64) -> Result<()> {
    let place = bytes.get_mut(at..).and_then(|rest| rest.first_chunk_mut()).context("cut short")?;
    *place = value.to_le_bytes();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An object with sections of these names and bytes, the first of them the names themselves.
    fn object(sections: &[(&str, &[u8])]) -> Vec<u8> {
        let mut names = vec![0];
        let at: Vec<u32> = sections
            .iter()
            .map(|(name, _)| {
                let at = names.len() as u32;
                names.extend(name.bytes().chain([0]));
                at
            })
            .collect();
        let mut bytes = b"\x7fELF\x02\x01".to_vec();
        bytes.resize(HEADER, 0);
        let mut headers = vec![0; SECTION];
        for (index, (_, contents)) in sections.iter().enumerate() {
            let contents = if index == 0 { &names } else { *contents };
            let mut own = [0; SECTION];
            own[..4].copy_from_slice(&at[index].to_le_bytes());
            own[KIND] = 1;
            set(&mut own, OFFSET, bytes.len() as u64).unwrap();
            set(&mut own, SIZE, contents.len() as u64).unwrap();
            set(&mut own, ALIGNMENT, 8).unwrap();
            bytes.extend(contents);
            headers.extend(own);
        }
        let at = bytes.len() as u64;
        set(&mut bytes, SECTIONS_AT, at).unwrap();
        bytes[COUNT_AT] = 1 + sections.len() as u8;
        bytes[NAMES_AT] = 1;
        bytes.extend(headers);
        bytes
    }

    #[test]
    fn what_is_loaded_stays() {
        let whole: &[(&str, &[u8])] = &[
            (".strtab", b""),
            ("classifier", b"code"),
            (".debug_info", b"0123456789"),
            (".BTF", b"types"),
            (".rel.BTF", b"relocations"),
        ];
        let before = object(whole);
        let after = strip(&before).unwrap();
        assert!(after.len() < before.len());
        let sections = word64(&after, SECTIONS_AT).unwrap() as usize;
        let found: Vec<&[u8]> = (1..6)
            .map(|index| contents(&after, &after[sections + index * SECTION..][..SECTION]).unwrap())
            .collect();
        assert_eq!(found[1..], [&b"code"[..], b"", b"types", b""]);
        assert_eq!(strip(&after).unwrap(), after, "nothing is left to take out");
    }

    #[test]
    fn what_is_cut_short_is_refused() {
        let whole = object(&[(".strtab", b""), ("classifier", b"code")]);
        for length in 0..whole.len() {
            assert!(strip(&whole[..length]).is_err(), "{length}");
        }
    }
}
