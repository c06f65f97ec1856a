//! Linker options of the command line: see `targets/link.inc`.

include!("../../targets/link.inc");

fn main() {
    link_with(&["../../targets/no-unwind.ld"]);
}
