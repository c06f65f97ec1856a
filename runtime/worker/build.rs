//! How the worker is linked: see `targets/link.rs`.

include!("../../targets/link.rs");

fn main() {
    leave_out_unwind_tables("../../targets/no-unwind.ld");
}
