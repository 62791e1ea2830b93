//! The screen of `top`: a view and what the reader set, drawn into cells.

use super::screen::Screen;
use super::view::{Cell, Column, Panel, Tone, View};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};

/// Lines of a panel that are not rows: its title and its head.
const HEADER_LINES: u16 = 2;

/// Most characters of a cell of text.
const MAX_CELL_WIDTH: usize = 60;

const HELP: &[&str] = &[
    "q, Esc      quit",
    "Tab, 1-7    another panel",
    "Enter, z    the panel alone, or all of them",
    "s, S        sort by the next column, or the one before",
    "r           the other way round",
    "/           filter rows by a text; Enter keeps it, Esc drops it",
    "arrows      scroll the panel; PgUp, PgDn, Home, End",
    "p, Space    pause",
    "?, h        this",
];

/// Draws everything. `note` is a word on the connection, where something is wrong with it.
pub(crate) fn draw(view: &View, screen: &Screen, note: &str, buffer: &mut Buffer) {
    let area = buffer.area;
    let [width, height] = [area.width, area.height];
    if width == 0 || height == 0 {
        return;
    }
    let title = format!("harmonaize top  {}", view.title);
    bar(buffer, 0, &title, &state(screen, note), Style::new().add_modifier(Modifier::BOLD));
    if height < 3 {
        return;
    }
    bar(buffer, height - 1, &footer(view, screen), "q quit  ? help", dim());
    if screen.help {
        for (line, text) in (2..height - 1).zip(help(view, usize::from(width.saturating_sub(2)))) {
            put(buffer, 2, line, &text, width.saturating_sub(2), Style::new());
        }
        return;
    }
    let panels: Vec<(usize, &Panel)> = view.panels.iter().enumerate().collect();
    let panels: Vec<(usize, &Panel)> = match screen.maximized {
        true => panels.into_iter().filter(|(index, _)| *index == screen.focus).collect(),
        false => panels,
    };
    let prepared: Vec<(usize, &Panel, Vec<&Vec<Cell>>)> =
        panels.into_iter().map(|(index, panel)| (index, panel, screen.rows(panel))).collect();
    let wanted: Vec<usize> = prepared.iter().map(|(_, _, rows)| rows.len()).collect();
    let mut line = 1;
    for ((index, panel, rows), room) in prepared.iter().zip(allocate_lines(height - 2, &wanted)) {
        let space = Rect { x: 0, y: line, width, height: room };
        draw_panel(panel, rows, screen, *index == screen.focus, space, buffer);
        line += room;
    }
}

/// Lines of the help: the keys, and all that is not measured. The screen's last line seldom has room for the latter.
fn help(view: &View, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = HELP.iter().map(|line| (*line).to_owned()).collect();
    if !view.missing.is_empty() {
        lines.extend([String::new(), "not measured:".to_owned()]);
        lines.extend(view.missing.iter().flat_map(|text| wrapped(text, width)));
    }
    lines
}

/// A text in lines of so many characters, indented from the second on. A longer word is a line, and cut on the screen.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(format!("  {word}")),
        }
    }
    lines
}

/// Lines for each panel: what it needs, as far as there is room, and never less than a title.
fn allocate_lines(height: u16, needed: &[usize]) -> Vec<u16> {
    let mut left = height;
    let mut give = |most: u16| {
        let given = most.min(left);
        left -= given;
        given
    };
    let mut rooms: Vec<u16> = needed.iter().map(|_| give(1)).collect();
    for room in &mut rooms {
        *room += give(2);
    }
    let needs: Vec<u16> = needed
        .iter()
        .map(|rows| u16::try_from(*rows).unwrap_or(u16::MAX).saturating_add(HEADER_LINES))
        .collect();
    while rooms.iter().zip(&needs).any(|(room, need)| room < need) {
        let before: u32 = rooms.iter().map(|room| u32::from(*room)).sum();
        for (room, need) in rooms.iter_mut().zip(&needs) {
            *room += give(u16::from(*room < *need));
        }
        if rooms.iter().map(|room| u32::from(*room)).sum::<u32>() == before {
            break;
        }
    }
    rooms
}

/// Lines that show everything, for a frame of any height.
pub(crate) fn full_height(view: &View, screen: &Screen) -> u16 {
    let panels = view.panels.iter().map(|panel| screen.rows(panel).len().max(1) + usize::from(HEADER_LINES));
    u16::try_from(panels.sum::<usize>() + 2).unwrap_or(u16::MAX)
}

fn state(screen: &Screen, note: &str) -> String {
    match (note, screen.paused) {
        ("", false) => String::new(),
        ("", true) => "paused".to_owned(),
        (note, _) => note.to_owned(),
    }
}

fn footer(view: &View, screen: &Screen) -> String {
    if screen.typing {
        return format!("/{}_", screen.filter);
    }
    let filter = if screen.filter.is_empty() { String::new() } else { format!("/{}  ", screen.filter) };
    match view.missing.as_slice() {
        [] => format!("{filter}{}", view.account),
        [one] => format!("{filter}{}; not measured: {one}", view.account),
        [one, rest @ ..] => format!("{filter}{}; not measured: {one}, and {} more", view.account, rest.len()),
    }
}

/// Takes all colours away. What is bold, underlined or reversed stays so.
pub(crate) fn without_colours(buffer: &mut Buffer) {
    for cell in &mut buffer.content {
        cell.set_fg(Color::Reset).set_bg(Color::Reset);
    }
}

fn dim() -> Style {
    Style::new().fg(Color::DarkGray)
}

fn tone(tone: Tone) -> Style {
    match tone {
        Tone::Plain => Style::new(),
        Tone::Dim => dim(),
        Tone::Good => Style::new().fg(Color::Green),
        Tone::Warn => Style::new().fg(Color::Yellow),
        Tone::Bad => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
    }
}

/// A line with a text on the left, cut where it meets the one on the right.
fn bar(buffer: &mut Buffer, line: u16, left: &str, right: &str, style: Style) {
    let width = buffer.area.width;
    let room = width.saturating_sub(u16::try_from(right.chars().count()).unwrap_or(u16::MAX));
    put(buffer, 0, line, left, room.saturating_sub(u16::from(!right.is_empty())), style);
    put(buffer, room, line, right, width - room, style);
}

fn put(buffer: &mut Buffer, x: u16, y: u16, text: &str, width: u16, style: Style) {
    let inside = x < buffer.area.width && y < buffer.area.height;
    if inside && width > 0 {
        buffer.set_stringn(x, y, text, usize::from(width), style);
    }
}

fn draw_panel(
    panel: &Panel,
    rows: &[&Vec<Cell>],
    screen: &Screen,
    focused: bool,
    space: Rect,
    buffer: &mut Buffer,
) {
    if space.height == 0 {
        return;
    }
    let mut title = Style::new().add_modifier(Modifier::REVERSED);
    if focused && !screen.maximized {
        title = title.fg(Color::Cyan).add_modifier(Modifier::BOLD);
    }
    let below = usize::from(space.height.saturating_sub(HEADER_LINES));
    let (first, hidden) = screen.window(panel.kind, rows.len(), below);
    let more = match (panel.rows.len() - rows.len(), hidden) {
        (0, 0) => String::new(),
        (0, hidden) => format!("{hidden} more "),
        (filtered, 0) => format!("{filtered} filtered "),
        (filtered, hidden) => format!("{hidden} more, {filtered} filtered "),
    };
    put(buffer, 0, space.y, &" ".repeat(usize::from(space.width)), space.width, title);
    let line = Rect { height: 1, ..space };
    let mut only = Buffer::empty(Rect { x: 0, y: 0, width: line.width, height: 1 });
    bar(&mut only, 0, &format!(" {}", panel.title), &more, title);
    for (x, cell) in (0..line.width).zip(&only.content) {
        let (symbol, place) = (cell.symbol().to_owned(), buffer.cell_mut((x, space.y)));
        if let Some(place) = place.filter(|_| symbol != " ") {
            place.set_symbol(&symbol);
        }
    }
    if space.height < 2 {
        return;
    }
    if panel.rows.is_empty() {
        return put(buffer, 2, space.y + 1, panel.empty, space.width.saturating_sub(2), dim());
    }
    let layout = columns(panel, rows, usize::from(space.width));
    let sorted = screen.sorted(panel);
    let head = layout.iter().filter_map(|(index, width)| Some((panel.columns.get(*index)?, *index, *width)));
    let mut x = 1;
    for (column, index, width) in head {
        let mark = match sorted {
            Some((by, _)) if by == index => Style::new().add_modifier(Modifier::UNDERLINED),
            _ => Style::new(),
        };
        place(buffer, x, space.y + 1, column.name, width, column.right, mark.fg(Color::Cyan));
        x += width as u16 + 2;
    }
    for (row, y) in rows.iter().skip(first).zip(space.y + HEADER_LINES..space.y + space.height) {
        let mut x = 1;
        for (index, width) in &layout {
            let (Some(cell), Some(column)) = (row.get(*index), panel.columns.get(*index)) else { continue };
            place(buffer, x, y, &cell.text, *width, column.right, tone(cell.tone));
            x += *width as u16 + 2;
        }
    }
}

fn place(buffer: &mut Buffer, x: u16, y: u16, text: &str, width: usize, right: bool, style: Style) {
    let length = text.chars().count();
    let shown: String = match length > width {
        true => text.chars().take(width.saturating_sub(1)).chain(['~']).collect(),
        false => text.to_owned(),
    };
    let space = if right { width.saturating_sub(length) } else { 0 };
    put(buffer, x.saturating_add(space as u16), y, &shown, (width - space) as u16, style);
}

/// The columns that fit, and their widths: what can be spared most goes first.
fn columns(panel: &Panel, rows: &[&Vec<Cell>], width: usize) -> Vec<(usize, usize)> {
    let natural = |(index, column): (usize, &Column)| {
        let cells = rows.iter().filter_map(|row| row.get(index)).map(|cell| cell.text.chars().count());
        (index, cells.chain([column.name.chars().count()]).max().unwrap_or(0).min(MAX_CELL_WIDTH))
    };
    let mut kept: Vec<(usize, usize)> = panel.columns.iter().enumerate().map(natural).collect();
    let total = |kept: &[(usize, usize)]| kept.iter().map(|(_, width)| width + 2).sum::<usize>();
    while total(&kept) > width + 1 {
        let spare = |index: usize| panel.columns.get(index).map_or(0, |column| column.drop_priority);
        let most = kept.iter().enumerate().max_by_key(|(_, (index, _))| (spare(*index), *index));
        match most.map(|(place, (index, _))| (place, spare(*index))) {
            Some((place, 1..)) => drop(kept.remove(place)),
            _ => break,
        }
    }
    // What cannot be spared is cut, the widest first.
    while total(&kept) > width + 1 {
        let Some((_, widest)) = kept.iter_mut().max_by_key(|(_, width)| *width) else { break };
        if *widest <= 4 {
            break;
        }
        *widest -= 1;
    }
    kept
}

/// The cells as lines of text.
pub(crate) fn lines(buffer: &Buffer) -> String {
    let width = usize::from(buffer.area.width).max(1);
    let lines = buffer.content.chunks(width).map(|line| {
        let line: String = line.iter().map(ratatui::buffer::Cell::symbol).collect();
        format!("{}\n", line.trim_end())
    });
    lines.collect()
}
