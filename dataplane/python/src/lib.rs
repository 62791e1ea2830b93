//! The Python module `harmonaize._core`: the client's calls on Python's objects.
//!
//! A call that waits releases the interpreter's lock and returns to it often enough for Ctrl-C. Tensors are exported where they
//! are, by the buffer protocol and by DLPack. [`staged`] is the way of memory that somebody else owns: torch's.
//!
//! Architecture invariant: knows what `harmonaize-client` knows, and nothing of torch but addresses and lengths.

mod blocking;
mod client;
mod communicator;
mod dictionaries;
mod dlpack;
mod dtype;
mod errors;
mod events;
mod operation;
mod protection;
mod region;
mod staged;
mod tensor;

use pyo3::prelude::*;

/// The compiled part of the package `harmonaize`.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<client::Client>()?;
    module.add_class::<communicator::Communicator>()?;
    module.add_class::<communicator::Group>()?;
    module.add_class::<events::Events>()?;
    module.add_class::<operation::Operation>()?;
    module.add_class::<operation::Receipt>()?;
    module.add_class::<protection::Protection>()?;
    module.add_class::<protection::RankState>()?;
    module.add_class::<protection::Restored>()?;
    module.add_class::<region::Region>()?;
    module.add_class::<staged::Staged>()?;
    module.add_class::<tensor::Tensor>()?;
    module.add_class::<client::Feedback>()?;
    module.add_function(wrap_pyfunction!(operation::wait_any, module)?)?;
    Ok(())
}
