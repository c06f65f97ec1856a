//! The linker options of `targets/link.inc`.

include!("../../targets/link.inc");

fn main() {
    link_with(&["../../targets/no-unwind.ld", "../../targets/hot-code.ld"]);
}
