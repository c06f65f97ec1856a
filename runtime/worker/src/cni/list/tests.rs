//! Property: any plugin object reaches the plugin unchanged but for the documented keys.
