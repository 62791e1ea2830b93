//! HTML pages of one file.

use crate::Chart;
use anyhow::Result;
use maud::{DOCTYPE, Markup, PreEscaped, html};

const STYLE: &str = "
:root{color-scheme:light dark;--paper:#fff;--ink:#1a1a1a;--soft:#555;--grid:#ddd;--good:#00704f;--bad:#b00020}
@media (prefers-color-scheme:dark){:root{--paper:#16181c;--ink:#e8e8e8;--soft:#aaa;--grid:#3a3d44;--good:#3ddc97;--bad:#ff6b81}}
figure{margin:1rem 0}figure svg{width:100%;height:auto}
body{background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}td,th{text-align:left;padding:.25rem .9rem .25rem 0;border-bottom:1px solid var(--grid)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}.good{color:var(--good)}.bad{color:var(--bad)}small{color:var(--soft)}";

/// A page with its style; it asks for no other file.
pub fn page(title: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width,initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body { (body) }
        }
    };
    page.into_string()
}

/// A chart of a page, with its heading for those who do not see it.
///
/// # Errors
/// Where it cannot be drawn.
pub fn figure(chart: &Chart) -> Result<Markup> {
    // Inside a page an SVG names no outside resource, not even its namespace.
    let svg = chart.svg()?.replace(" xmlns=\"http://www.w3.org/2000/svg\"", "");
    Ok(html! { figure role="img" aria-label=(chart.title) { (PreEscaped(svg)) } })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Axes, Series};

    #[test]
    fn a_page_names_no_outside_resource() {
        let series = vec![Series { name: "<s>".into(), points: vec![(1024.0, 1.0), (4096.0, 2.0)] }];
        let [x, y] = ["x", "y"].map(str::to_owned);
        let chart = Chart { title: "T".into(), x, y, axes: Axes::Sizes, series, marks: Vec::new() };
        let html = page("a < b", &figure(&chart).unwrap());
        for outside in ["http:", "https:", "src=", "href=", "url(", "@import", "<script"] {
            assert!(!html.contains(outside), "{outside}");
        }
        for inside in ["a &lt; b", "&lt;s&gt;", "aria-label=\"T\"", "</svg>"] {
            assert!(html.contains(inside), "{inside}");
        }
    }
}
