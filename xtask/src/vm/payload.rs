//! The uncompressed kernel inside a package's image, which the emulator boots soonest.
//!
//! A bzImage of x86 (Linux, Documentation/arch/x86/boot.rst), an arm64 image as it is (Documentation/arch/arm64/booting.rst),
//! or one that unpacks itself under EFI (drivers/firmware/efi/libstub/zboot-header.S).

use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

/// Where x86's boot protocol keeps the setup code's length, in sectors of 512 bytes after the first.
const SETUP_SECTORS: usize = 0x1f1;
/// That protocol's signature.
const SIGNATURE: (usize, &[u8]) = (0x202, b"HdrS");
/// The payload's offset after the setup code, and its length.
const PAYLOAD: (usize, usize) = (0x248, 0x24c);
/// What an arm64 image has in its header, packed or not.
const ARM64: (usize, &[u8]) = (0x38, b"ARMd");
/// What an image that unpacks itself under EFI has in its header.
const EFI: (usize, &[u8]) = (4, b"zimg");
/// The offset of its payload, and its length.
const EFI_PAYLOAD: (usize, usize) = (8, 12);
/// How an unpacked x86 image begins.
const ELF: (usize, &[u8]) = (0, b"\x7fELF");

/// How a payload is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packing {
    None,
    Xz,
    Zstd,
    Gzip,
}

/// Unpacks the kernel in the image `packed` into `plain`.
pub(super) fn unpack(packed: &Path, plain: &Path) -> Result<()> {
    let image = fs::read(packed).with_context(|| format!("cannot read {}", packed.display()))?;
    let found = find(&image).with_context(|| format!("{} is no kernel that is known here", packed.display()));
    let (packing, payload) = found?;
    let input = plain.with_extension("packed");
    fs::write(&input, payload)?;
    let mut program = match packing {
        Packing::None => command("cat", &[]),
        // After the stream stands its unpacked length, which xz would take for a damaged second stream.
        Packing::Xz => command("xz", &["-dc", "--single-stream"]),
        Packing::Zstd => command("zstd", &["-dcq"]),
        Packing::Gzip => command("gzip", &["-dc"]),
    };
    let part = plain.with_extension("part");
    program.stdin(File::open(&input)?).stdout(File::create(&part)?);
    harmonaize_testkit::workspace::run(&mut program)?;
    fs::remove_file(&input)?;
    let mut start = [0; 64];
    std::io::Read::read_exact(&mut File::open(&part)?, &mut start)?;
    if !has(&start, ELF) && !has(&start, ARM64) {
        bail!("the payload of {} is no image that boots", packed.display());
    }
    fs::rename(&part, plain)?;
    Ok(())
}

fn has(image: &[u8], (at, mark): (usize, &[u8])) -> bool {
    image.get(at..).is_some_and(|rest| rest.starts_with(mark))
}

fn command(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).stderr(Stdio::inherit());
    command
}

/// The payload of an image, without the length that the kernel's build appends to some.
fn find(image: &[u8]) -> Result<(Packing, &[u8])> {
    let word = |at: usize| -> Option<usize> {
        let bytes = image.get(at..at.checked_add(4)?)?;
        usize::try_from(u32::from_le_bytes(bytes.try_into().ok()?)).ok()
    };
    let slice = |start: usize, length: usize| image.get(start..start.checked_add(length)?);
    let payload = if has(image, SIGNATURE) {
        let setup = || -> Option<usize> {
            let sectors = match usize::from(*image.get(SETUP_SECTORS)?) {
                0 => 4,
                sectors => sectors,
            };
            sectors.checked_add(1)?.checked_mul(512)?.checked_add(word(PAYLOAD.0)?)
        };
        setup().zip(word(PAYLOAD.1)).and_then(|(start, length)| slice(start, length))
    } else if has(image, EFI) {
        word(EFI_PAYLOAD.0).zip(word(EFI_PAYLOAD.1)).and_then(|(start, length)| slice(start, length))
    } else if has(image, ARM64) {
        return Ok((Packing::None, image));
    } else {
        bail!("no boot protocol's signature is in it");
    };
    let payload = payload.context("the payload lies outside the file")?;
    if payload.starts_with(b"\xfd7zXZ\0") {
        Ok((Packing::Xz, payload))
    } else if payload.starts_with(b"\x28\xb5\x2f\xfd") {
        Ok((Packing::Zstd, payload.get(..payload.len().saturating_sub(4)).unwrap_or_default()))
    } else if payload.starts_with(b"\x1f\x8b") {
        Ok((Packing::Gzip, payload))
    } else {
        bail!("the payload is packed in a way that is not known here");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 1024 + 16];
        image[SETUP_SECTORS] = 1;
        image[SIGNATURE.0..][..4].copy_from_slice(SIGNATURE.1);
        image[PAYLOAD.0..][..4].copy_from_slice(&16_u32.to_le_bytes());
        image[PAYLOAD.1..][..4].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
        image.extend_from_slice(payload);
        image
    }

    #[test]
    fn the_payload_is_found_by_the_header() {
        let xz = b"\xfd7zXZ\0and so on";
        assert_eq!(find(&image(xz)).unwrap(), (Packing::Xz, &xz[..]));
        let zstd = b"\x28\xb5\x2f\xfdbodyLLLL";
        assert_eq!(find(&image(zstd)).unwrap(), (Packing::Zstd, &zstd[..8]));
        assert!(find(&image(b"what")).unwrap_err().to_string().contains("not known"));
    }

    #[test]
    fn damaged_images_are_refused() {
        assert!(find(b"").is_err());
        let mut short = image(b"\xfd7zXZ\0and so on");
        short.pop();
        assert!(find(&short).unwrap_err().to_string().contains("outside"));
        let mut far = image(b"\xfd7zXZ\0");
        far[PAYLOAD.0..][..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(find(&far).unwrap_err().to_string().contains("outside"));
    }

    #[test]
    fn images_of_arm64_are_plain_or_unpack_themselves() {
        let mut plain = vec![0; 128];
        plain[ARM64.0..][..4].copy_from_slice(ARM64.1);
        assert_eq!(find(&plain).unwrap(), (Packing::None, &plain[..]));
        assert!(find(&plain[..0x3a]).is_err(), "cut off in its mark");
        let payload = b"\x1f\x8band so on";
        let mut packed = vec![0; 128];
        packed[..2].copy_from_slice(b"MZ");
        packed[EFI.0..][..4].copy_from_slice(EFI.1);
        packed[EFI_PAYLOAD.0..][..4].copy_from_slice(&128_u32.to_le_bytes());
        packed[EFI_PAYLOAD.1..][..4].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
        packed.extend_from_slice(payload);
        packed.extend_from_slice(b"after");
        assert_eq!(find(&packed).unwrap(), (Packing::Gzip, &payload[..]));
        packed[EFI_PAYLOAD.0..][..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(find(&packed).unwrap_err().to_string().contains("outside"));
    }

    #[test]
    fn unknown_images_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (packed, plain) = (folder.path().join("vmlinuz"), folder.path().join("vmlinux"));
        let mut image = vec![7; 256];
        image[ARM64.0..][..4].copy_from_slice(ARM64.1);
        fs::write(&packed, &image).unwrap();
        unpack(&packed, &plain).unwrap();
        assert_eq!(fs::read(&plain).unwrap(), image);
        fs::write(&packed, "no kernel").unwrap();
        assert!(unpack(&packed, &folder.path().join("other")).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing half done stays");
    }
}
