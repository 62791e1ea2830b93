//! Memory of the process's own that the agent has mapped.

use crate::dtype;
use crate::errors::{argument, raised};
use crate::tensor::{Shape, Tensor};
use harmonaize_client as client;
use harmonaize_client::RegionRefused;
use pyo3::prelude::*;
use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

/// A range of a memfd of the process's own, on which tensors need no copy. The agent lets go of it when it and its tensors are gone.
#[pyclass(frozen, module = "harmonaize")]
pub(crate) struct Region {
    /// None once it is let go of.
    inner: Mutex<Option<client::Region>>,
    bytes: u64,
}

impl Region {
    /// The bytes from `offset` on of a memfd, given by its number or by what has a `fileno()`. They go to its end where no number is
    /// given.
    pub(crate) fn register(
        client: &client::Client,
        memfd: &Bound<'_, PyAny>,
        offset: u64,
        bytes: Option<u64>,
    ) -> PyResult<Self> {
        let py = memfd.py();
        let number: RawFd = match memfd.extract() {
            Ok(number) => number,
            Err(_) => memfd.call_method0("fileno")?.extract()?,
        };
        if number < 0 {
            return Err(argument(py, &format!("{number} is no descriptor")));
        }
        // SAFETY: not -1. The interpreter's lock is held, and the copy is used from here on. Of one that is not open the kernel says so.
        let copy: OwnedFd = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned()?;
        let file = File::from(copy);
        let bytes = match bytes {
            Some(bytes) => bytes,
            None => file.metadata()?.len().saturating_sub(offset),
        };
        let end =
            offset.checked_add(bytes).ok_or_else(|| argument(py, "a range that ends beyond all files"))?;
        let region = py.detach(|| client.register(&file, offset..end)).map_err(|error| raised(py, &error))?;
        Ok(Self { bytes: region.bytes(), inner: Mutex::new(Some(region)) })
    }
}

#[pymethods]
impl Region {
    /// How many bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// A tensor on the bytes from `offset` on, with whatever they hold. The offset is a multiple of an element's bytes; operations are
    /// fastest where it is one of 64.
    #[pyo3(signature = (dtype, shape, *, offset = 0))]
    fn tensor(
        &self,
        py: Python<'_>,
        dtype: &Bound<'_, PyAny>,
        shape: Shape,
        offset: u64,
    ) -> PyResult<Tensor> {
        let dtype = dtype::parse(dtype)?;
        let region = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let region = region.as_ref().ok_or_else(|| gone(py))?;
        Tensor::on(shape, |elements| {
            region.tensor(dtype, offset, elements).map_err(|error| raised(py, &error))
        })
    }

    /// Has the agent let go of it, and waits until it has. Where tensors on it are left it is refused, and let go once those are gone.
    fn unregister(&self, py: Python<'_>) -> PyResult<()> {
        let region = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        let region = region.ok_or_else(|| gone(py))?;
        py.detach(|| region.unregister()).map_err(|error| raised(py, &error))
    }

    fn __repr__(&self) -> String {
        format!("Region({} bytes)", self.bytes)
    }
}

fn gone(py: Python<'_>) -> PyErr {
    raised(py, &client::Error::Region(RegionRefused::Unknown))
}
