//! Formats a JSON value as YAML, in block style. A string that could be read as another type is in double
//! quotes, with the escapes of JSON. A library for any value would be larger than this file.

use serde_json::Value;

use super::units::escaped_json;

/// Formats the document, which ends with a line feed.
pub(crate) fn text(value: &Value) -> String {
    let mut text = String::new();
    match value {
        Value::Object(members) if !members.is_empty() => block(&mut text, value, 0),
        Value::Array(items) if !items.is_empty() => block(&mut text, value, 0),
        _ => text = scalar(value) + "\n",
    }
    escaped_json(&text)
}

/// Adds the members of an object or the items of an array, each on separate lines. If the text does not end
/// with a line feed, the first one continues the current line.
fn block(text: &mut String, value: &Value, depth: usize) {
    let start = |text: &mut String| {
        if text.is_empty() || text.ends_with('\n') {
            text.push_str(&"  ".repeat(depth));
        }
    };
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                start(text);
                text.push_str(&string(name));
                text.push(':');
                match member {
                    // Items of an array are as deep as its name, as Kubernetes writes them.
                    Value::Array(items) if !items.is_empty() => {
                        text.push('\n');
                        block(text, member, depth);
                    }
                    Value::Object(members) if !members.is_empty() => {
                        text.push('\n');
                        block(text, member, depth + 1);
                    }
                    _ => {
                        text.push(' ');
                        text.push_str(&scalar(member));
                        text.push('\n');
                    }
                }
            }
        }
        Value::Array(items) => {
            for item in items {
                start(text);
                text.push_str("- ");
                match item {
                    Value::Object(members) if !members.is_empty() => block(text, item, depth + 1),
                    Value::Array(items) if !items.is_empty() => block(text, item, depth + 1),
                    _ => {
                        text.push_str(&scalar(item));
                        text.push('\n');
                    }
                }
            }
        }
        _ => {}
    }
}

fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) => string(text),
        other => other.to_string(),
    }
}

/// Adds a plain word, or a string in quotes. A word is plain only if it begins with a letter and no version
/// of YAML reads it as a boolean or null.
fn string(text: &str) -> String {
    const WORDS: [&str; 8] = ["true", "false", "yes", "no", "on", "off", "null", "y"];
    let is_plain = text.starts_with(|letter: char| letter.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'/'))
        && !WORDS.iter().any(|word| text.eq_ignore_ascii_case(word))
        && !text.eq_ignore_ascii_case("n");
    if is_plain { text.to_owned() } else { Value::from(text).to_string() }
}

#[cfg(test)]
mod tests {
    use super::text;
    use serde_json::json;

    #[test]
    fn values_are_blocks_and_doubtful_strings_are_in_quotes() {
        let value = json!({
            "items": [
                { "id": "0e1", "labels": {}, "list": ["a", ["b"]], "name": "web", "nested": { "on": true } },
                { "id": "no", "size": 7, "text": "a: b\n\u{1b}" },
            ],
            "none": [],
            "nothing": null,
        });
        let expected = "items:\n\
                        - id: \"0e1\"\n  labels: {}\n  list:\n  - a\n  - - b\n  name: web\n  nested:\n    \"on\": true\n\
                        - id: \"no\"\n  size: 7\n  text: \"a: b\\n\\u001b\"\n\
                        none: []\nnothing: null\n";
        assert_eq!(text(&value), expected);
        assert_eq!(text(&json!({ "items": [] })), "items: []\n");
        assert_eq!(text(&json!({})), "{}\n");
    }
}
