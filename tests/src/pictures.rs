//! The pictures of the documentation are drawn from text: the overview from `docs/pictures/overview.txt`, the plots from the
//! tables that `make bench` and `make bench-peers` print and `docs/performance.md` has, so that no plot shows other numbers.
//! `UPDATE=1 cargo test -p coracle-tests --test house pictures` draws those of the documentation; the benchmarks draw the
//! plots of what they have measured into `target/bench`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Colours for light and dark pages.
const STYLE: &str = "<style>text{font:13px sans-serif;fill:#1c1c1c}.t{font-weight:bold}.n{fill:#555}.b{fill:#eef3f8;stroke:#46627f}\
    .l{stroke:#46627f;fill:none}.h{fill:#46627f}.ours{fill:#2f6f9f}.floor{fill:#9aa7b3}.peer{fill:#c8783c}.cours{stroke:#2f6f9f;stroke-width:2;fill:none}\
    .cpeer{stroke:#c8783c;stroke-width:2;fill:none}.g{stroke:#9aa7b3;stroke-width:.5}\
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

/// Draws the boxes and arrows of a description such as `docs/pictures/overview.txt`.
///
/// # Panics
/// If the description has a line of another form.
pub fn overview(description: &str) -> String {
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

fn bars(title: &str, unit: &str, groups: &[(&str, Vec<Bar>)]) -> String {
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

/// A line of a plot: its label, its points in the units of both axes, its class.
type Curve = (&'static str, Vec<(f64, f64)>, &'static str);

/// Draws curves over a common horizontal axis; both axes begin at 0 and have these highest values.
fn curves(title: &str, [across, up]: [(&str, f64, f64); 2], curves: &[Curve]) -> String {
    const LEFT: f64 = 60.0;
    const BOTTOM: f64 = 260.0;
    const WIDTH: f64 = 600.0;
    const HEIGHT: f64 = 210.0;
    let mut picture = head(720, 310, title);
    text(&mut picture, (10.0, 22.0), "t", "start", title);
    let place = |(x, y): (f64, f64)| (LEFT + x / across.1 * WIDTH, BOTTOM - y / up.1 * HEIGHT);
    let ticks = |(_, end, step): (&str, f64, f64)| {
        (0..=(end / step) as u32).map(move |tick| f64::from(tick) * step).collect::<Vec<_>>()
    };
    for tick in ticks(up) {
        let (_, y) = place((0.0, tick));
        let _ = writeln!(picture, "<path d=\"M{LEFT} {y:.1}h{WIDTH}\" class=\"g\"/>");
        text(&mut picture, (LEFT - 6.0, y + 4.0), "n", "end", &tick.to_string());
    }
    for tick in ticks(across) {
        let (x, _) = place((tick, 0.0));
        text(&mut picture, (x, BOTTOM + 18.0), "n", "middle", &tick.to_string());
    }
    text(&mut picture, (LEFT + WIDTH, BOTTOM + 38.0), "n", "end", across.0);
    text(&mut picture, (10.0, 42.0), "n", "start", up.0);
    for (label, points, class) in curves {
        let line: Vec<_> =
            points.iter().map(|point| place(*point)).map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
        let _ = writeln!(picture, "<path d=\"M{}\" class=\"c{class}\"/>", line.join("L"));
        for point in points {
            let (x, y) = place(*point);
            let _ = writeln!(picture, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" class=\"{class}\"/>");
        }
        let last = points.last().copied().unwrap_or_default();
        let (x, y) = place(last);
        let (at, anchor) =
            if x > LEFT + WIDTH / 2.0 { ((x, y - 12.0), "end") } else { ((x + 10.0, y + 4.0), "start") };
        text(&mut picture, at, "", anchor, &format!("{label}: {} {} with {} pods", last.1, up.0, last.0));
    }
    picture + "</svg>\n"
}

/// Memory over the number of pods.
fn pods(own: &str, compared: &str) -> String {
    let all = |page: &str, cell: usize, names: &[(f64, &str)]| -> Vec<(f64, f64)> {
        names.iter().map(|(pods, name)| (*pods, number(row(page, name)[cell]))).collect()
    };
    let ours = [
        (0.0, "daemon idle PSS"),
        (50.0, "all coracle processes with 50"),
        (500.0, "all coracle processes with 500"),
    ];
    let theirs = [(0.0, "daemon idle, PSS"), (50.0, "everything with 50 pods")];
    let theirs = all(compared, 2, &theirs);
    let highest = theirs.iter().map(|(_, memory)| *memory).fold(0.0, f64::max);
    curves(
        "Memory of a node's runtime by the number of pods (PSS)",
        [("pods", 500.0, 50.0), ("MB", (highest / 50.0).ceil() * 50.0, 50.0)],
        &[("containerd with runc", theirs, "peer"), ("coracle", all(own, 2, &ours), "ours")],
    )
}

/// Draws the plots by the name of their files: `own` has the rows of `make bench`, `compared` those of `make bench-peers`. If
/// there are several rows for the same quantity, the first is drawn.
///
/// # Panics
/// If a row is missing, or has no number where one is drawn.
pub fn plots(own: &str, compared: &str) -> BTreeMap<&'static str, String> {
    let memory = bars(
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
    let start = bars(
        "Start of a pod with one container, image present (p50)",
        "ms",
        &[
            ("host network, measured by turns", peers(compared, "pod up, host network")),
            ("bridge network, measured by turns", peers(compared, "pod up, bridge network, p50")),
            ("host network, beside the floor", floor(own, "pod up, host network")),
            ("bridge network, beside the floor", floor(own, "pod up, bridge network built in")),
        ],
    );
    BTreeMap::from([("memory.svg", memory), ("pods.svg", pods(own, compared)), ("start.svg", start)])
}

/// Splits docs/performance.md into the part with the table of `make bench` and that with the table of `make bench-peers`.
///
/// # Panics
/// If the page has no such parts.
pub fn parts(page: &str) -> (&str, &str) {
    page.split_once("## Comparison with containerd").expect("both sections")
}
