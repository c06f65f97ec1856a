//! The pictures of the documentation are drawn from text: the overview from `docs/pictures/overview.txt`, the plots from the
//! tables that `make bench` and `make bench-peers` print and `docs/performance.md` has, so that no plot shows other numbers.
//! `UPDATE=1 cargo test -p coracle-tests --test house pictures` draws them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;

use crate::root;

/// Colours for light and dark pages.
const STYLE: &str = "<style>text{font:13px sans-serif;fill:#1c1c1c}.t{font-weight:bold}.n{fill:#555}.b{fill:#eef3f8;stroke:#46627f}\
    .l{stroke:#46627f;fill:none}.h{fill:#46627f}.ours{fill:#2f6f9f}.floor{fill:#9aa7b3}.peer{fill:#c8783c}\
    @media(prefers-color-scheme:dark){text{fill:#e6e6e6}.n{fill:#b0b0b0}.b{fill:#223040;stroke:#8fb0d0}.l{stroke:#8fb0d0}\
    .h{fill:#8fb0d0}}</style>";

fn head(width: u32, height: u32, title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         role=\"img\"><title>{title}</title>{STYLE}\n"
    )
}

fn text(picture: &mut String, (x, y): (f64, f64), class: &str, anchor: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(
        picture,
        "<text x=\"{x:.0}\" y=\"{y:.0}\" class=\"{class}\" text-anchor=\"{anchor}\">{text}</text>"
    );
}

/// The words of a line of the description; a text in quotes is one word.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (index, part) in line.split('"').enumerate() {
        match index % 2 {
            0 => words.extend(part.split_whitespace().map(str::to_owned)),
            _ => words.push(part.to_owned()),
        }
    }
    words
}

/// Left, top, width, height.
type Frame = [f64; 4];

fn point(boxes: &BTreeMap<String, Frame>, name: &str) -> (f64, f64) {
    let (name, side) = name.split_once('.').expect("a box and its side");
    let [left, top, width, height] = boxes[name];
    match side {
        "left" => (left, top + height / 2.0),
        "right" => (left + width, top + height / 2.0),
        "top" => (left + width / 2.0, top),
        "bottom" => (left + width / 2.0, top + height),
        _ => panic!("no side {side}"),
    }
}

fn overview(description: &str) -> String {
    let (mut picture, mut boxes) = (String::new(), BTreeMap::new());
    for line in description.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let words = words(line);
        let number = |index: usize| words[index].parse::<f64>().expect("a number");
        match words[0].as_str() {
            "size" => {
                picture.push_str(&head(number(1) as u32, number(2) as u32, "The processes of coracle"));
            }
            "box" => {
                let frame = [number(2), number(3), number(4), number(5)];
                let [left, top, width, height] = frame;
                let _ = writeln!(
                    picture,
                    "<rect x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{height}\" rx=\"5\" class=\"b\"/>"
                );
                let first = top + (height - 18.0 * (words.len() - 6) as f64) / 2.0 + 13.0;
                for (index, line) in words[6..].iter().enumerate() {
                    let at = (left + width / 2.0, first + 18.0 * index as f64);
                    text(&mut picture, at, if index == 0 { "t" } else { "n" }, "middle", line);
                }
                boxes.insert(words[1].clone(), frame);
            }
            "arrow" => {
                let ((x, y), (to_x, to_y)) = (point(&boxes, &words[1]), point(&boxes, &words[2]));
                let _ = writeln!(picture, "<path d=\"M{x} {y}L{to_x} {to_y}\" class=\"l\"/>");
                let length = (to_x - x).hypot(to_y - y);
                let (along_x, along_y) = ((to_x - x) / length * 9.0, (to_y - y) / length * 9.0);
                let (back_x, back_y) = (to_x - along_x, to_y - along_y);
                let _ = writeln!(
                    picture,
                    "<path d=\"M{to_x} {to_y}L{:.1} {:.1}L{:.1} {:.1}Z\" class=\"h\"/>",
                    back_x - along_y / 2.0,
                    back_y + along_x / 2.0,
                    back_x + along_y / 2.0,
                    back_y - along_x / 2.0
                );
                let beside = if to_x == x { (x + 22.0, 4.0) } else { ((x + to_x) / 2.0, -6.0) };
                text(&mut picture, (beside.0, (y + to_y) / 2.0 + beside.1), "n", "middle", &words[3]);
            }
            other => panic!("no {other} in a picture"),
        }
    }
    picture + "</svg>\n"
}

/// The first number in a cell of a table.
fn number(cell: &str) -> f64 {
    let start =
        cell.find(|letter: char| letter.is_ascii_digit()).unwrap_or_else(|| panic!("a number in {cell:?}"));
    let end = cell[start..].find(|letter: char| !letter.is_ascii_digit() && letter != '.');
    cell[start..end.map_or(cell.len(), |end| start + end)].parse().expect("a number")
}

/// The cells of the row of a table whose first cell begins with `name`.
fn row<'a>(page: &'a str, name: &str) -> Vec<&'a str> {
    let found = page.lines().find(|line| line.starts_with(&format!("| {name}")));
    let row = found.unwrap_or_else(|| panic!("no row {name} in docs/performance.md"));
    row.trim_matches('|').split('|').map(str::trim).collect()
}

/// A bar: its label, its length in the unit of the plot, its class.
type Bar = (String, f64, &'static str);

fn plot(title: &str, unit: &str, groups: &[(&str, Vec<Bar>)]) -> String {
    let bars: usize = groups.iter().map(|(_, bars)| bars.len()).sum();
    let height = 44 + 24 * bars + 30 * groups.len();
    let mut picture = head(720, height as u32, title);
    text(&mut picture, (10.0, 22.0), "t", "start", title);
    let mut y = 34.0;
    for (name, bars) in groups {
        y += 18.0;
        text(&mut picture, (10.0, y), "n", "start", name);
        // Each group has a scale of its own: its longest bar is as wide as the plot.
        let longest = bars.iter().map(|(_, value, _)| *value).fold(f64::MIN_POSITIVE, f64::max);
        for (label, value, class) in bars {
            y += 24.0;
            let width = (value / longest * 400.0).max(1.0);
            text(&mut picture, (180.0, y), "", "end", label);
            let top = y - 13.0;
            let _ = writeln!(
                picture,
                "<rect x=\"190\" y=\"{top:.0}\" width=\"{width:.1}\" height=\"17\" class=\"{class}\"/>"
            );
            text(&mut picture, (196.0 + width, y), "n", "start", &format!("{value} {unit}"));
        }
        y += 12.0;
    }
    picture + "</svg>\n"
}

/// Both runtimes, from a row of the comparison.
fn peers(page: &str, name: &str) -> Vec<Bar> {
    let cells = row(page, name);
    let bar = |label: &str, cell: &str, class| (label.to_owned(), number(cell), class);
    vec![bar("coracle", cells[1], "ours"), bar("containerd with runc", cells[2], "peer")]
}

/// coracle and the floor, from a row of `make bench`.
fn floor(page: &str, name: &str) -> Vec<Bar> {
    let cells = row(page, name);
    let (_, floor) = cells[3].split_once('(').expect("the floor's own times");
    vec![
        ("the kernel's part alone".to_owned(), number(floor), "floor"),
        ("coracle".to_owned(), number(cells[2]), "ours"),
    ]
}

fn drawn() -> BTreeMap<&'static str, String> {
    let read =
        |path: &str| fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    let page = read("docs/performance.md");
    let (own, compared) = page.split_once("## Comparison with containerd").expect("both sections");
    let memory = plot(
        "Memory of a node's runtime, without the containers' own processes (PSS)",
        "MB",
        &[
            ("no pods, after 1000 requests", peers(compared, "daemon idle, PSS")),
            ("50 pods", peers(compared, "everything with 50 pods")),
            (
                "coracle alone, by the number of pods",
                vec![
                    ("idle".into(), number(row(own, "daemon idle PSS")[2]), "ours"),
                    ("50, in use".into(), number(row(own, "all coracle processes with 50")[2]), "ours"),
                    ("500, in use".into(), number(row(own, "all coracle processes with 500")[2]), "ours"),
                ],
            ),
        ],
    );
    let start = plot(
        "Start of a pod with one container, image present (p50)",
        "ms",
        &[
            ("host network, measured by turns", peers(compared, "pod up, host network")),
            ("bridge network, measured by turns", peers(compared, "pod up, bridge network, p50")),
            ("host network, beside the floor", floor(own, "pod up, host network")),
            ("bridge network, beside the floor", floor(own, "pod up, bridge network built in")),
        ],
    );
    BTreeMap::from([
        ("docs/pictures/overview.svg", overview(&read("docs/pictures/overview.txt"))),
        ("docs/pictures/memory.svg", memory),
        ("docs/pictures/start.svg", start),
    ])
}

#[test]
fn pictures_are_those_of_their_sources() {
    for (path, picture) in drawn() {
        let path = root().join(path);
        if std::env::var_os("UPDATE").is_some() {
            fs::write(&path, &picture).expect("the picture");
        }
        let committed = fs::read_to_string(&path).unwrap_or_default();
        assert!(committed == picture, "{}: draw it again with UPDATE=1", path.display());
    }
}
