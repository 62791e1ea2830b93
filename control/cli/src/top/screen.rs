//! What a reader of `top` set: focus, sorting, filter, scrolling; and the keys that set it.

use super::view::{Cell, Kind, Panel, View};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::collections::BTreeMap;

/// Longest filter.
const MAX_FILTER: usize = 60;

/// What a key asks for beyond another screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Nothing.
    Nothing,
    /// The end.
    Quit,
}

/// What the reader set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Screen {
    /// The panel that keys are about.
    pub focus: usize,
    /// Whether it is shown alone.
    pub maximized: bool,
    /// Rows without this text are left out.
    pub filter: String,
    /// Whether keys go to the filter.
    pub typing: bool,
    /// Whether the view stands still.
    pub paused: bool,
    /// Whether keys are explained.
    pub help: bool,
    /// By panel: the column that it is sorted by, and whether the largest come first.
    sorting: BTreeMap<Kind, (usize, bool)>,
    scroll: BTreeMap<Kind, usize>,
}

impl Screen {
    /// With a filter from the start.
    pub(crate) fn filtered(filter: &str) -> Self {
        Self { filter: filter.to_owned(), ..Self::default() }
    }

    /// The column that a panel is sorted by, and whether the largest come first.
    pub(crate) fn sorted(&self, panel: &Panel) -> Option<(usize, bool)> {
        self.sorting.get(&panel.kind).copied().or_else(|| panel.sorted_by.map(|column| (column, true)))
    }

    /// A panel's rows as they are to be shown.
    pub(crate) fn rows<'a>(&self, panel: &'a Panel) -> Vec<&'a Vec<Cell>> {
        let wanted = self.filter.to_lowercase();
        let found = |row: &&Vec<Cell>| row.iter().any(|cell| cell.text.to_lowercase().contains(&wanted));
        let mut rows: Vec<&Vec<Cell>> = panel.rows.iter().filter(found).collect();
        if let Some((column, descending)) = self.sorted(panel) {
            let key = |row: &&Vec<Cell>| row.get(column).map(|cell| (cell.order, cell.text.clone()));
            rows.sort_by_cached_key(key);
            if descending {
                rows.reverse();
            }
        }
        rows
    }

    /// The first row that is shown, and how many are not, where `room` of `rows` have a place.
    pub(crate) fn window(&self, kind: Kind, rows: usize, room: usize) -> (usize, usize) {
        let hidden = rows.saturating_sub(room);
        (self.scroll.get(&kind).copied().unwrap_or(0).min(hidden), hidden)
    }

    /// Takes a key.
    pub(crate) fn key(&mut self, key: KeyEvent, view: &View) -> Action {
        if key.kind == KeyEventKind::Release {
            return Action::Nothing;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return if matches!(key.code, KeyCode::Char('c' | 'd')) { Action::Quit } else { Action::Nothing };
        }
        if self.typing {
            self.type_filter(key.code);
            return Action::Nothing;
        }
        let panels = view.panels.len().max(1);
        match key.code {
            KeyCode::Esc if self.help => self.help = false,
            KeyCode::Char('q') | KeyCode::Esc => return Action::Quit,
            KeyCode::Char('?' | 'h') => self.help = !self.help,
            KeyCode::Char('p' | ' ') => self.paused = !self.paused,
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Tab => self.focus = (self.focus + 1) % panels,
            KeyCode::BackTab => self.focus = (self.focus + panels - 1) % panels,
            KeyCode::Enter | KeyCode::Char('z') => self.maximized = !self.maximized,
            KeyCode::Char(digit @ '1'..='9') => {
                let panel = digit as usize - '1' as usize;
                if panel < panels {
                    self.focus = panel;
                }
            }
            code => {
                if let Some(panel) = view.panels.get(self.focus) {
                    self.panel_key(code, panel);
                }
            }
        }
        Action::Nothing
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => (self.typing, self.filter) = (false, String::new()),
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(c) if self.filter.chars().count() < MAX_FILTER && !c.is_control() => {
                self.filter.push(c)
            }
            _ => {}
        }
    }

    fn panel_key(&mut self, code: KeyCode, panel: &Panel) {
        let columns = panel.columns.len().max(1);
        let sorted = self.sorted(panel);
        let scroll = self.scroll.entry(panel.kind).or_insert(0);
        *scroll = (*scroll).min(panel.rows.len());
        match (code, sorted) {
            (KeyCode::Char('s'), None) => drop(self.sorting.insert(panel.kind, (0, false))),
            (KeyCode::Char('s'), Some((column, way))) => {
                self.sorting.insert(panel.kind, ((column + 1) % columns, way));
            }
            (KeyCode::Char('S'), sorted) => {
                let (column, way) = sorted.unwrap_or((0, true));
                self.sorting.insert(panel.kind, ((column + columns - 1) % columns, way));
            }
            (KeyCode::Char('r'), Some((column, way))) => {
                self.sorting.insert(panel.kind, (column, !way));
            }
            (KeyCode::Down | KeyCode::Char('j'), _) => *scroll = scroll.saturating_add(1),
            (KeyCode::Up | KeyCode::Char('k'), _) => *scroll = scroll.saturating_sub(1),
            (KeyCode::PageDown, _) => *scroll = scroll.saturating_add(10),
            (KeyCode::PageUp, _) => *scroll = scroll.saturating_sub(10),
            (KeyCode::Home, _) => *scroll = 0,
            (KeyCode::End, _) => *scroll = panel.rows.len(),
            _ => {}
        }
    }
}
