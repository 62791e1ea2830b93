//! What programs show Prometheus. It is a page of metrics in the text of OpenMetrics, and the listener that answers scrapes
//! with it.
#![forbid(unsafe_code)]

mod http;
mod page;
mod recent;

pub use http::{listen, serve};
pub use page::{Buckets, Family, Labels, Page, label};
pub use recent::Recent;
