//! Linker options of the command line: see `targets/link.inc`.

include!("../../targets/link.inc");

fn main() {
    leave_out_unwind_tables("../../targets/no-unwind.ld");
}
