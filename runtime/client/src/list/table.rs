//! A table with the column widths of crictl: at least 20 characters, 3 of them free.

use std::fmt;

use super::units::one_line;

/// Minimum width of a column in characters, as in crictl.
const WIDTH_MIN: usize = 20;
const SPACE: usize = 3;

/// Rows with a heading; each cell is one line without characters that a terminal would execute.
#[derive(Default)]
pub(super) struct Table {
    columns: usize,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(heading: &[&str]) -> Table {
        let mut table = Table::default();
        table.rows.push(Vec::new());
        table.more(true, heading);
        table
    }

    /// Adds columns if `is_wanted`; rows have a cell for each possible column.
    pub(super) fn more(&mut self, is_wanted: bool, heading: &[&str]) {
        if let (true, Some(first)) = (is_wanted, self.rows.first_mut()) {
            first.extend(heading.iter().map(|&title| title.to_owned()));
            self.columns = first.len();
        }
    }

    pub(super) fn row<const CELLS: usize>(&mut self, cells: [String; CELLS]) {
        self.rows.push(cells.iter().take(self.columns).map(|cell| one_line(cell)).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let longest = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|cell: &String| cell.chars().count()).max()
        };
        let widths: Vec<usize> =
            (0..self.columns).map(|column| WIDTH_MIN.max(longest(column).unwrap_or(0) + SPACE)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line.push_str(&format!("{cell:<width$}"));
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Table;

    #[test]
    fn columns_are_aligned_and_a_cell_is_one_line() {
        let mut table = Table::new(&["NAME", "B"]);
        table.more(false, &["C"]);
        table.row(["größe".into(), "1".into(), "not shown".into()]);
        table.row(["a\nb\u{1b}[2J and more".into(), String::new(), String::new()]);
        let expected = "NAME                        B\n\
                        größe                       1\n\
                        a\\u{a}b\\u{1b}[2J and more\n";
        assert_eq!(table.to_string(), expected);
        assert_eq!(Table::new(&["A", "B"]).to_string(), "A                   B\n");
    }
}
