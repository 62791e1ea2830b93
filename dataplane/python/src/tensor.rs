//! Tensors in an attachment's memory, exported where they are.

use crate::errors::{argument, raised};
use crate::{dlpack, dtype};
use harmonaize_client as client;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};
use std::ffi::c_int;
use std::ptr::null_mut;

/// Elements of one type, contiguous, in memory that the agent reaches.
#[pyclass(frozen, module = "harmonaize", weakref)]
#[derive(Debug)]
pub(crate) struct Tensor {
    pub(crate) inner: client::Tensor,
    /// As exporters give it: signed.
    shape: Vec<isize>,
    /// In bytes.
    strides: Vec<isize>,
}

/// A shape as Python gives it: a number, or a sequence of them.
#[derive(FromPyObject)]
pub(crate) enum Shape {
    /// So many elements.
    Elements(u64),
    /// So many along each dimension.
    Dimensions(Vec<u64>),
}

impl Shape {
    fn dimensions(self) -> Vec<u64> {
        match self {
            Self::Elements(elements) => vec![elements],
            Self::Dimensions(dimensions) => dimensions,
        }
    }
}

/// Elements of a shape, if that is a number.
fn elements(dimensions: &[u64]) -> PyResult<u64> {
    let product = dimensions.iter().try_fold(1_u64, |product, dimension| product.checked_mul(*dimension));
    product
        .filter(|elements| isize::try_from(*elements).is_ok())
        .ok_or_else(|| PyValueError::new_err(format!("a tensor of shape {dimensions:?} is too large")))
}

impl Tensor {
    /// A new tensor of a client.
    pub(crate) fn new(
        py: Python<'_>,
        client: &client::Client,
        dtype: client::Dtype,
        shape: Shape,
    ) -> PyResult<Self> {
        // It may wait for the agent, where the arena grows.
        Self::on(shape, |elements| {
            py.detach(|| client.tensor(dtype, elements)).map_err(|error| raised(py, &error))
        })
    }

    /// A tensor of this shape, of which `make` has the elements.
    pub(crate) fn on(shape: Shape, make: impl FnOnce(u64) -> PyResult<client::Tensor>) -> PyResult<Self> {
        let dimensions = shape.dimensions();
        let inner = make(elements(&dimensions)?)?;
        Ok(Self::of(inner, &dimensions))
    }

    fn of(inner: client::Tensor, dimensions: &[u64]) -> Self {
        let shape: Vec<isize> = dimensions.iter().map(|dimension| *dimension as isize).collect();
        let mut strides = vec![0; shape.len()];
        let mut stride = inner.dtype().size() as isize;
        for (slot, dimension) in strides.iter_mut().zip(&shape).rev() {
            *slot = stride;
            stride = stride.saturating_mul(*dimension);
        }
        Self { inner, shape, strides }
    }

    /// Elements along each dimension.
    pub(crate) fn dimensions(&self) -> Vec<u64> {
        self.shape.iter().map(|dimension| dimension.unsigned_abs() as u64).collect()
    }

    /// The first byte, for writing.
    fn address(&self, py: Python<'_>) -> PyResult<*mut u8> {
        self.inner.view_mut().map(|view| view.pointer()).map_err(|error| raised(py, &error))
    }
}

#[pymethods]
impl Tensor {
    /// Name of the element type, as NumPy has it.
    #[getter]
    fn dtype(&self) -> &'static str {
        dtype::numpy_name(self.inner.dtype())
    }

    /// Elements along each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// How many bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn __len__(&self) -> usize {
        self.shape.first().map_or(1, |first| *first as usize)
    }

    fn __repr__(&self) -> String {
        format!("Tensor({}, shape={:?})", self.dtype(), self.shape)
    }

    /// A part of it, by elements of the flattened tensor: it shares the memory, and is used wherever a tensor is.
    fn slice(&self, py: Python<'_>, start: u64, stop: u64) -> PyResult<Self> {
        let inner = self.inner.slice(start..stop).map_err(|error| raised(py, &error))?;
        let elements = inner.elements();
        Ok(Self::of(inner, &[elements]))
    }

    /// The same elements in another shape.
    fn reshape(&self, py: Python<'_>, shape: Shape) -> PyResult<Self> {
        let dimensions = shape.dimensions();
        if elements(&dimensions)? != self.inner.elements() {
            let own = self.inner.elements();
            return Err(argument(py, &format!("{own} elements do not have the shape {dimensions:?}")));
        }
        let inner = self.inner.slice(..).map_err(|error| raised(py, &error))?;
        Ok(Self::of(inner, &dimensions))
    }

    /// A NumPy array of the same memory.
    fn numpy<'py>(slf: Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        if dtype::format(slf.get().inner.dtype()).is_none() {
            let name = slf.get().dtype();
            return Err(argument(py, &format!("NumPy has no {name}; torch.from_dlpack takes it")));
        }
        py.import("numpy")?.call_method1("asarray", (slf,))
    }

    /// A tensor of torch's of the same memory.
    fn torch<'py>(slf: Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("torch")?.call_method1("from_dlpack", (slf,))
    }

    /// Copies the elements of an object that has the buffer protocol in, such as a NumPy array's or bytes.
    fn copy_from(slf: &Bound<'_, Self>, source: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = slf.py();
        let own = memoryview(slf.as_any())?.call_method1("cast", ("B",))?;
        let theirs = memoryview(source)?;
        if !theirs.getattr("c_contiguous")?.extract::<bool>()? {
            return Err(argument(py, "a buffer with gaps; make it contiguous first"));
        }
        let (bytes, own_bytes) = (theirs.getattr("nbytes")?.extract::<u64>()?, slf.get().inner.bytes());
        if bytes != own_bytes {
            return Err(argument(py, &format!("{bytes} bytes for a tensor of {own_bytes}")));
        }
        own.set_item(pyo3::types::PySlice::full(py), theirs.call_method1("cast", ("B",))?)
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        slf: Bound<'py, Self>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let _ = stream;
        if dl_device.is_some_and(|device| device != dlpack::CPU) {
            return Err(PyBufferError::new_err(
                "a tensor of the arena lies in the host's memory, not on a device",
            ));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("a tensor of the arena is given as it is, not as a copy"));
        }
        let tensor = slf.get();
        let pointer = tensor.address(slf.py())?;
        let layout = dlpack::Layout {
            pointer,
            dtype: dtype::dlpack(tensor.inner.dtype()),
            shape: tensor.shape.iter().map(|dimension| *dimension as i64).collect(),
        };
        let versioned = max_version.is_some_and(|version| version >= (1, 0));
        dlpack::export(slf.py(), slf.clone().into_any().unbind(), layout, versioned)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::CPU
    }

    #[allow(clippy::missing_safety_doc, reason = "called by the interpreter alone")]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let tensor = slf.get();
        if view.is_null() {
            return Err(PyBufferError::new_err("no view to fill"));
        }
        let Some(format) = dtype::format(tensor.inner.dtype()) else {
            let name = tensor.dtype();
            let text = format!("the buffer protocol has no {name}; use DLPack, as torch.from_dlpack does");
            return Err(PyBufferError::new_err(text));
        };
        let pointer = tensor.address(slf.py())?;
        let dimensions = tensor.shape.len();
        let asked = |flag: c_int| flags & flag == flag;
        let or_none =
            |given: bool, values: &[isize]| if given { values.as_ptr().cast_mut() } else { null_mut() };
        // SAFETY: the interpreter gives a view to fill. What it points to lives as long as the tensor, which is frozen and which
        // the view refers to.
        unsafe {
            let view = &mut *view;
            view.buf = pointer.cast();
            view.len = tensor.inner.bytes() as isize;
            view.itemsize = tensor.inner.dtype().size() as isize;
            view.readonly = 0;
            view.ndim = dimensions as c_int;
            view.format = if asked(ffi::PyBUF_FORMAT) { format.as_ptr().cast_mut() } else { null_mut() };
            view.shape = or_none(asked(ffi::PyBUF_ND), &tensor.shape);
            view.strides = or_none(asked(ffi::PyBUF_STRIDES), &tensor.strides);
            view.suboffsets = null_mut();
            view.internal = null_mut();
            view.obj = slf.clone().into_any().into_ptr();
        }
        Ok(())
    }

    #[allow(clippy::missing_safety_doc, reason = "called by the interpreter alone")]
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {}
}

/// What the buffer protocol says of an object.
fn memoryview<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    object.py().import("builtins")?.call_method1("memoryview", (object,))
}

/// A tensor with the shape, the type and the contents of an object that has the buffer protocol.
pub(crate) fn copied<'py>(
    client: &client::Client,
    source: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, Tensor>> {
    let py = source.py();
    let view = memoryview(source)?;
    let format = view.getattr("format")?.extract::<String>()?;
    let format = std::ffi::CString::new(format)?;
    let dtype = dtype::of_buffer(&format, view.getattr("itemsize")?.extract()?)?;
    let shape = view.getattr("shape")?.extract::<Vec<u64>>()?;
    let tensor = Bound::new(py, Tensor::new(py, client, dtype, Shape::Dimensions(shape))?)?;
    Tensor::copy_from(&tensor, source)?;
    Ok(tensor)
}
