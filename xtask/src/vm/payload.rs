//! The uncompressed kernel inside a bzImage, which the emulator boots much sooner (Linux, Documentation/arch/x86/boot.rst).

use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

/// Where the boot protocol keeps the setup code's length, in sectors of 512 bytes after the first.
const SETUP_SECTORS: usize = 0x1f1;
/// The protocol's signature.
const SIGNATURE: (usize, &[u8]) = (0x202, b"HdrS");
/// The payload's offset after the setup code, and its length.
const PAYLOAD: (usize, usize) = (0x248, 0x24c);

/// How a payload is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packing {
    Xz,
    Zstd,
    Gzip,
}

/// Unpacks the kernel in the bzImage `packed` into `plain`.
pub(super) fn unpack(packed: &Path, plain: &Path) -> Result<()> {
    let image = fs::read(packed).with_context(|| format!("cannot read {}", packed.display()))?;
    let (packing, payload) = find(&image).with_context(|| format!("{} is no bzImage", packed.display()))?;
    let input = plain.with_extension("packed");
    fs::write(&input, payload)?;
    let mut program = match packing {
        // After the stream stands its unpacked length, which xz would take for a damaged second stream.
        Packing::Xz => command("xz", &["-dc", "--single-stream"]),
        Packing::Zstd => command("zstd", &["-dcq"]),
        Packing::Gzip => command("gzip", &["-dc"]),
    };
    let part = plain.with_extension("part");
    program.stdin(File::open(&input)?).stdout(File::create(&part)?);
    crate::workspace::run(&mut program)?;
    fs::remove_file(&input)?;
    let mut magic = [0; 4];
    std::io::Read::read_exact(&mut File::open(&part)?, &mut magic)?;
    if magic != *b"\x7fELF" {
        bail!("the payload of {} is not an ELF image", packed.display());
    }
    fs::rename(&part, plain)?;
    Ok(())
}

fn command(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).stderr(Stdio::inherit());
    command
}

/// The packed payload of a bzImage, without the length that the kernel's build appends to some.
fn find(image: &[u8]) -> Result<(Packing, &[u8])> {
    let signature = image.get(SIGNATURE.0..).unwrap_or_default();
    if !signature.starts_with(SIGNATURE.1) {
        bail!("the boot protocol's signature is missing");
    }
    let word = |at: usize| -> Option<usize> {
        let bytes = image.get(at..at.checked_add(4)?)?;
        usize::try_from(u32::from_le_bytes(bytes.try_into().ok()?)).ok()
    };
    let range = || -> Option<&[u8]> {
        let sectors = match usize::from(*image.get(SETUP_SECTORS)?) {
            0 => 4,
            sectors => sectors,
        };
        let start = sectors.checked_add(1)?.checked_mul(512)?.checked_add(word(PAYLOAD.0)?)?;
        image.get(start..start.checked_add(word(PAYLOAD.1)?)?)
    };
    let payload = range().context("the payload lies outside the file")?;
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
}
