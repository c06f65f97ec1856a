//! The final status of a session: the text or JSON on its error stream (streaming 6.5).

use serde_json::json;

/// Format of the status, which depends on the version of the subprotocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// v1 and v2: text, only for failures.
    Text,
    /// v3: text; terminals can be resized.
    TextAndResize,
    /// v4 and v5: always one JSON status.
    Json,
}

impl Dialect {
    /// The format of a subprotocol.
    pub(super) fn of(protocol: &str) -> Dialect {
        match protocol {
            "v5.channel.k8s.io" | "v4.channel.k8s.io" | "v4.base64.channel.k8s.io" => Dialect::Json,
            "v3.channel.k8s.io" => Dialect::TextAndResize,
            _ => Dialect::Text,
        }
    }

    /// Whether clients open a stream for terminal sizes.
    pub(super) fn has_resize(self) -> bool {
        self != Dialect::Text
    }
}

/// The status of a session without an error.
pub(super) fn success(dialect: Dialect) -> Vec<u8> {
    match dialect {
        Dialect::Json => json!({ "metadata": {}, "status": "Success" }).to_string().into_bytes(),
        Dialect::Text | Dialect::TextAndResize => Vec::new(),
    }
}

/// The status of a command that exited with this code, 0 to 255.
pub(super) fn exited(dialect: Dialect, code: i32) -> Vec<u8> {
    if code == 0 {
        return success(dialect);
    }
    let message = format!("command terminated with non-zero exit code: exit status {code}");
    match dialect {
        Dialect::Json => json!({
            "metadata": {}, "status": "Failure", "message": message, "reason": "NonZeroExitCode",
            "details": { "causes": [{ "reason": "ExitCode", "message": code.to_string() }] },
        })
        .to_string()
        .into_bytes(),
        Dialect::Text | Dialect::TextAndResize => message.into_bytes(),
    }
}

/// The status of a session that failed.
pub(super) fn failed(dialect: Dialect, why: &str) -> Vec<u8> {
    match dialect {
        Dialect::Json => json!({
            "metadata": {}, "status": "Failure", "message": format!("Internal error occurred: {why}"),
            "reason": "InternalError", "code": 500,
        })
        .to_string()
        .into_bytes(),
        Dialect::Text | Dialect::TextAndResize => why.as_bytes().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_has_the_exit_code_where_clients_expect_it() {
        let status: serde_json::Value = serde_json::from_slice(&exited(Dialect::Json, 137)).unwrap();
        assert_eq!(status["details"]["causes"][0], json!({ "reason": "ExitCode", "message": "137" }));
        assert_eq!(status["reason"], "NonZeroExitCode");
        assert_eq!(exited(Dialect::Json, 0), success(Dialect::Json));
        assert!(exited(Dialect::Text, 0).is_empty());
        assert!(String::from_utf8(exited(Dialect::of("v2.channel.k8s.io"), 3)).unwrap().ends_with(" 3"));
    }
}
