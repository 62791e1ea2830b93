//! A rank's state as bytes: a file of safetensors, with rank and step in its header.

use crate::tensor::{COPY_BYTES, Tensor};
use crate::{Error, ProtectionError};
use harmonaize_abi::{Dtype, Rank};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

/// Bytes of the header's length, which a file begins with.
const LENGTH_BYTES: u64 = 8;
/// Longest header that readers of the format accept.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const METADATA: &str = "__metadata__";

/// What the format calls element types.
const DTYPES: [(Dtype, &str); 16] = [
    (Dtype::I8, "I8"),
    (Dtype::U8, "U8"),
    (Dtype::I16, "I16"),
    (Dtype::U16, "U16"),
    (Dtype::I32, "I32"),
    (Dtype::U32, "U32"),
    (Dtype::I64, "I64"),
    (Dtype::U64, "U64"),
    (Dtype::F16, "F16"),
    (Dtype::Bf16, "BF16"),
    (Dtype::F32, "F32"),
    (Dtype::F64, "F64"),
    (Dtype::Bool, "BOOL"),
    (Dtype::Complex64, "C64"),
    (Dtype::F8E4M3, "F8_E4M3"),
    (Dtype::F8E5M2, "F8_E5M2"),
];

/// What an image begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) rank: Rank,
    pub(crate) step: u64,
    pub(crate) places: BTreeMap<String, Place>,
    /// Bytes before the tensors'.
    begin: u64,
}

/// A tensor of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) dtype: Dtype,
    pub(crate) elements: u64,
    /// Elements along each dimension.
    pub(crate) shape: Vec<u64>,
    /// Where in the image it begins, in bytes.
    pub(crate) begin: u64,
}

impl Place {
    fn bytes(&self) -> u64 {
        self.elements * self.dtype.size() as u64
    }
}

/// A tensor in the header, as the format has it.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl Header {
    /// Of a rank's tensors, at step 0. Tensors without a shape have one dimension. In the image, types of larger elements come first, so
    /// that every tensor is aligned.
    pub(crate) fn new(
        rank: Rank,
        tensors: &[(&str, &Tensor)],
        shapes: &BTreeMap<String, Vec<u64>>,
    ) -> Result<Self, Error> {
        let is_there = |name: &&String| tensors.iter().any(|(of, _)| of == name);
        if let Some(name) = shapes.keys().find(|name| !is_there(name)) {
            return Err(Error::Shape(format!("a shape of \"{name}\", of which no tensor is protected")));
        }
        let mut header = Self { rank, step: 0, places: BTreeMap::new(), begin: 0 };
        let mut sorted = tensors.to_vec();
        sorted.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.dtype().size()));
        let mut begin = 0;
        for (name, tensor) in sorted {
            let (dtype, elements) = (tensor.dtype(), tensor.elements());
            if format_name(dtype).is_none() {
                return Err(Error::Shape(format!(
                    "a protected tensor of {dtype}: safetensors has no such type"
                )));
            }
            let shape = shapes.get(name).cloned().unwrap_or_else(|| vec![elements]);
            if product(&shape) != Some(elements) {
                return Err(Error::Shape(format!(
                    "the protected tensor \"{name}\" has {elements} elements, which do not have the shape {shape:?}"
                )));
            }
            let place = Place { dtype, elements, shape, begin };
            let replaced = header.places.insert(name.to_owned(), place);
            if replaced.is_some() || name == METADATA {
                return Err(Error::Shape(format!(
                    "protected tensors have names of their own, and not \"{name}\""
                )));
            }
            begin += tensor.bytes();
        }
        // The longest step leaves as much room.
        let text = Self { step: u64::MAX, ..header.clone() }.text().len() as u64;
        header.begin = LENGTH_BYTES + text.next_multiple_of(8);
        if text > MAX_HEADER_BYTES - 8 {
            return Err(Error::Shape(format!("names of protected tensors that take {text} bytes together")));
        }
        header.places.values_mut().for_each(|place| place.begin += header.begin);
        Ok(header)
    }

    /// Bytes of the image.
    pub(crate) fn image_bytes(&self) -> u64 {
        self.places.values().fold(self.begin, |sum, place| sum + place.bytes())
    }

    fn text(&self) -> String {
        let entry = |(name, place): (&String, &Place)| {
            let begin = place.begin.saturating_sub(self.begin);
            let entry = json!({
                "dtype": format_name(place.dtype),
                "shape": place.shape,
                "data_offsets": [begin, begin + place.bytes()],
            });
            (name.clone(), entry)
        };
        let metadata = json!({ "rank": self.rank.0.to_string(), "step": self.step.to_string() });
        let mut header: Map<String, Value> = self.places.iter().map(entry).collect();
        header.insert(METADATA.to_owned(), metadata);
        Value::Object(header).to_string()
    }

    /// The bytes before the tensors'. The format has headers padded by spaces.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = (self.begin - LENGTH_BYTES).to_le_bytes().to_vec();
        bytes.extend(self.text().into_bytes());
        bytes.resize(self.begin as usize, b' ');
        bytes
    }

    /// The header of an image that a peer sent.
    pub(crate) fn decode(image: &Tensor) -> Result<Self, Error> {
        let damaged = |what: &str| ProtectionError::Damaged(what.to_owned());
        let mut length = [0; LENGTH_BYTES as usize];
        image.read_bytes(0, &mut length)?;
        let length = u64::from_le_bytes(length);
        let begin = LENGTH_BYTES.saturating_add(length);
        if length > MAX_HEADER_BYTES || begin > image.bytes() {
            return Err(damaged("its header is longer than it").into());
        }
        let mut text = vec![0; length as usize];
        image.read_bytes(LENGTH_BYTES, &mut text)?;
        let parsed: Result<Map<String, Value>, _> = serde_json::from_slice(&text);
        let mut entries = parsed.map_err(|error| ProtectionError::Damaged(error.to_string()))?;
        let metadata = entries.remove(METADATA).unwrap_or_default();
        let number = |key: &str| metadata.get(key)?.as_str()?.parse::<u64>().ok();
        let rank = number("rank").and_then(|rank| u32::try_from(rank).ok());
        let (Some(rank), Some(step)) = (rank, number("step")) else {
            return Err(damaged("it does not name its rank and step").into());
        };
        let place = |(name, entry): (String, Value)| {
            let entry: Entry = serde_json::from_value(entry).ok()?;
            let dtype = DTYPES.iter().find(|(_, text)| *text == entry.dtype)?.0;
            let elements = product(&entry.shape)?;
            let [first, end] = entry.data_offsets;
            let bytes = elements.checked_mul(dtype.size() as u64)?;
            let fits = first.checked_add(bytes) == Some(end) && end <= image.bytes() - begin;
            fits.then(|| (name, Place { dtype, elements, shape: entry.shape, begin: begin + first }))
        };
        let places: Option<_> = entries.into_iter().map(place).collect();
        let places =
            places.ok_or_else(|| damaged("a tensor lies outside of it, or is of an unknown type"))?;
        Ok(Self { rank: Rank(rank), step, places, begin })
    }
}

/// Elements of a shape, if they can be counted.
fn product(shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(1_u64, |product, size| product.checked_mul(*size))
}

fn format_name(dtype: Dtype) -> Option<&'static str> {
    DTYPES.iter().find(|(other, _)| *other == dtype).map(|(_, name)| *name)
}

/// Writes an image to a file, which is there as a whole, and on disk, or as it was before.
pub(crate) fn write_file(image: &Tensor, path: &Path) -> Result<(), Error> {
    let failed = |source| ProtectionError::File { path: path.to_owned(), source };
    let mut name = OsString::from(".");
    name.push(path.file_name().ok_or_else(|| failed(std::io::ErrorKind::InvalidInput.into()))?);
    // Whoever else writes to the path, in this process or on another machine, has a file of its own.
    name.push(format!(".{:016x}", super::random()?));
    let temporary = path.with_file_name(name);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = File::create_new(&temporary).map_err(failed)?;
    let mut write = || -> Result<(), Error> {
        let mut buffer = vec![0; COPY_BYTES];
        for at in (0..image.bytes()).step_by(COPY_BYTES) {
            buffer.truncate((image.bytes() - at).min(COPY_BYTES as u64) as usize);
            image.read_bytes(at, &mut buffer)?;
            file.write_all(&buffer).map_err(failed)?;
        }
        file.sync_all().map_err(failed)?;
        std::fs::rename(&temporary, path).map_err(failed)?;
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
        Ok(())
    };
    let written = write();
    if written.is_err() {
        // It may be named already.
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pool;
    use harmonaize_shm::{ForkGuard, Memory};
    use std::sync::Arc;

    fn pool() -> Arc<Pool> {
        Pool::fixed(Memory::private(1 << 22).unwrap(), ForkGuard::new().unwrap())
    }

    #[test]
    fn an_image_is_a_file_of_safetensors() {
        let pool = pool();
        let flags = Tensor::new(&pool, Dtype::U8, 3).unwrap();
        let weights = Tensor::new(&pool, Dtype::F32, 100_000).unwrap();
        let nothing = Tensor::new(&pool, Dtype::Bf16, 0).unwrap();
        flags.write(0, &[7_u8, 8, 9]).unwrap();
        let values: Vec<f32> = (0..100_000).map(|at| at as f32).collect();
        weights.write(0, &values).unwrap();
        let tensors = [("flags", &flags), ("weights", &weights), ("\"nothing\"", &nothing)];
        let shapes = BTreeMap::from([("weights".to_owned(), vec![250, 400])]);
        let header = Header::new(Rank(4), &tensors, &shapes).unwrap();
        assert_eq!(header.begin % 8, 0);
        let image = Tensor::new(&pool, Dtype::U8, header.image_bytes()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rank-4.safetensors");
        for step in [3, u64::MAX] {
            let header = Header { step, ..header.clone() };
            image.write_bytes(0, &header.encode()).unwrap();
            for (name, tensor) in tensors {
                image.copy_from(header.places[name].begin, tensor, 0, tensor.bytes()).unwrap();
            }
            assert_eq!(Header::decode(&image).unwrap(), header);
            write_file(&image, &path).unwrap();
            let file = std::fs::read(&path).unwrap();
            let length = usize::from_le_bytes(file[..8].try_into().unwrap());
            let (text, data) = file[8..].split_at(length);
            let parsed: Value = serde_json::from_slice(text).unwrap();
            assert_eq!(parsed[METADATA], json!({ "rank": "4", "step": step.to_string() }));
            let weights = json!({ "dtype": "F32", "shape": [250, 400], "data_offsets": [0, 400_000] });
            assert_eq!(parsed["weights"], weights);
            let empty = json!({ "dtype": "BF16", "shape": [0], "data_offsets": [400_000, 400_000] });
            assert_eq!(parsed["\"nothing\""], empty);
            assert_eq!(parsed["flags"]["data_offsets"], json!([400_000, 400_003]));
            assert_eq!(data.len(), 400_003);
            assert_eq!(data[4 * 70_000..][..4], 70_000_f32.to_le_bytes());
            assert_eq!(data[400_000..], [7, 8, 9]);
        }
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "something is left beside the file");
        let nowhere = folder.path().join("none").join("file");
        let error = write_file(&image, &nowhere).unwrap_err();
        assert!(matches!(error, Error::Protection(ProtectionError::File { .. })), "{error}");
        let copy = Tensor::new(&pool, Dtype::F32, 100_000).unwrap();
        copy.copy_from(0, &image, header.places["weights"].begin, copy.bytes()).unwrap();
        let mut read = vec![0.0_f32; 100_000];
        copy.read(0, &mut read).unwrap();
        assert_eq!(read, values);
    }

    #[test]
    fn writers_of_one_path_do_not_meet() {
        const BYTES: usize = 1 << 20;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.safetensors");
        std::thread::scope(|scope| {
            for value in [1_u8, 2] {
                let path = &path;
                scope.spawn(move || {
                    let image = Tensor::new(&pool(), Dtype::U8, BYTES as u64).unwrap();
                    image.write_bytes(0, &vec![value; BYTES]).unwrap();
                    for _ in 0..20 {
                        write_file(&image, path).unwrap();
                        let file = std::fs::read(path).unwrap();
                        assert!(file.iter().all(|byte| *byte == file[0]), "the states of both");
                        assert_eq!(file.len(), BYTES);
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "something is left beside the file");
    }

    #[test]
    fn a_file_that_cannot_be_named_leaves_nothing() {
        let image = Tensor::new(&pool(), Dtype::U8, 1000).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let taken = folder.path().join("taken");
        std::fs::create_dir(&taken).unwrap();
        let error = write_file(&image, &taken).unwrap_err();
        assert!(matches!(error, Error::Protection(ProtectionError::File { .. })), "{error}");
        let left: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(left, [taken]);
    }

    #[test]
    fn names_and_types_that_the_format_lacks_are_refused() {
        let pool = pool();
        let tensor = Tensor::new(&pool, Dtype::U8, 1).unwrap();
        let complex = Tensor::new(&pool, Dtype::Complex128, 1).unwrap();
        let none = BTreeMap::new();
        let refused = |tensors: &[(&str, &Tensor)]| {
            matches!(Header::new(Rank(0), tensors, &none), Err(Error::Shape(_)))
        };
        assert!(refused(&[("a", &tensor), ("a", &tensor)]));
        assert!(refused(&[(METADATA, &tensor)]));
        assert!(refused(&[("a", &complex)]));
        assert!(!refused(&[]));
    }

    #[test]
    fn shapes_are_of_the_tensors_elements() {
        let pool = pool();
        let tensor = Tensor::new(&pool, Dtype::U16, 6).unwrap();
        let header = |name: &str, shape: &[u64]| {
            let shapes = BTreeMap::from([(name.to_owned(), shape.to_vec())]);
            Header::new(Rank(0), &[("a", &tensor)], &shapes)
        };
        for shape in [&[6][..], &[2, 3], &[1, 6, 1]] {
            assert_eq!(header("a", shape).unwrap().places["a"].shape, shape);
        }
        for (name, shape) in [("a", &[][..]), ("a", &[5]), ("a", &[0, 6]), ("a", &[u64::MAX, 2]), ("b", &[6])]
        {
            let error = header(name, shape).unwrap_err();
            assert!(matches!(&error, Error::Shape(text) if text.contains(&format!("\"{name}\""))), "{error}");
        }
        let scalar = Tensor::new(&pool, Dtype::F64, 1).unwrap();
        let shapes = BTreeMap::from([("s".to_owned(), Vec::new())]);
        assert_eq!(Header::new(Rank(0), &[("s", &scalar)], &shapes).unwrap().places["s"].shape, [0_u64; 0]);
    }

    #[test]
    fn damaged_images_are_refused() {
        let pool = pool();
        let image = |header: &str, data: usize| {
            let image = Tensor::new(&pool, Dtype::U8, (8 + header.len() + data) as u64).unwrap();
            image.write_bytes(0, &(header.len() as u64).to_le_bytes()).unwrap();
            image.write_bytes(8, header.as_bytes()).unwrap();
            image
        };
        let metadata = r#""__metadata__":{"rank":"1","step":"2"}"#;
        let of = |entry: &str, data| image(&format!(r#"{{{metadata},"a":{entry}}}"#), data);
        let right = of(r#"{"dtype":"U16","shape":[2,3],"data_offsets":[0,12]}"#, 12);
        let place = &Header::decode(&right).unwrap().places["a"];
        assert_eq!((place.elements, &place.shape[..]), (6, &[2, 3][..]));
        let huge = format!(r#"{{"dtype":"U16","shape":[{},{}],"data_offsets":[0,0]}}"#, u64::MAX, u64::MAX);
        let wrong = [
            image("", 0),
            image("[]", 0),
            image("{}", 0),
            image(r#"{"__metadata__":{"rank":"4294967296","step":"2"}}"#, 0),
            image(r#"{"__metadata__":{"rank":1,"step":2}}"#, 0),
            of(r#"{"dtype":"U16","shape":[6],"data_offsets":[0,12]}"#, 11),
            of(r#"{"dtype":"U16","shape":[6],"data_offsets":[0,11]}"#, 12),
            of(r#"{"dtype":"U16","shape":[6],"data_offsets":[18446744073709551615,11]}"#, 12),
            of(r#"{"dtype":"U17","shape":[6],"data_offsets":[0,12]}"#, 12),
            of("7", 12),
            of(&huge, 12),
        ];
        for (number, image) in wrong.iter().enumerate() {
            let found = Header::decode(image);
            assert!(
                matches!(found, Err(Error::Protection(ProtectionError::Damaged(_)))),
                "{number}: {found:?}"
            );
        }
        right.write_bytes(0, &u64::MAX.to_le_bytes()).unwrap();
        assert!(Header::decode(&right).is_err());
        assert!(Header::decode(&Tensor::new(&pool, Dtype::U8, 7).unwrap()).is_err());
    }
}
