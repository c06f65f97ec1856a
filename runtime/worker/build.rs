//! Linker options of the worker: see `targets/link.inc`.

include!("../../targets/link.inc");

fn main() {
    leave_out_unwind_tables("../../targets/no-unwind.ld");
}
