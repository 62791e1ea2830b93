//! Columns that line up.

/// A table: the first row is its head. Numbers (rows that start with a digit in every cell of a column) stand right.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cell = |row: &Vec<String>, column: usize| row.get(column).cloned().unwrap_or_default();
    let body = || rows.iter().skip(1);
    let layout: Vec<(usize, bool)> = (0..columns)
        .map(|column| {
            let width = rows.iter().map(|row| cell(row, column).chars().count()).max().unwrap_or(0);
            let number = |row| cell(row, column).starts_with(|c: char| c.is_ascii_digit());
            let text = |row| cell(row, column).chars().any(|c| c.is_alphabetic());
            (width, body().all(|row| number(row) && !text(row)))
        })
        .collect();
    let mut shown = String::new();
    for row in rows {
        let cells = layout.iter().enumerate().map(|(column, (width, right))| {
            let text = cell(row, column);
            let space = " ".repeat(width.saturating_sub(text.chars().count()));
            if *right { space + &text } else { text + &space }
        });
        let line = cells.collect::<Vec<_>>().join("  ");
        shown += "  ";
        shown += line.trim_end();
        shown.push('\n');
    }
    shown
}

/// A row.
pub(crate) fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.iter().map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [row(["name", "ranks", "where"]), row(["a", "8", "h0,h1"]), row(["world", "16"])];
        assert_eq!(table(&rows), "  name   ranks  where\n  a          8  h0,h1\n  world     16\n");
    }
}
