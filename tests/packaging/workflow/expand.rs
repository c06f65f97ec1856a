//! Expressions of a workflow: `${{ NAME }}` in texts, and conditions. Of the functions only `startsWith` is known.

/// Replaces each `${{ NAME }}` by its value.
///
/// # Errors
/// A name without a value, or another expression.
pub(crate) fn expand(text: &str, value: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let mut parts = text.split("${{");
    let mut expanded = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) =
            part.split_once("}}").ok_or_else(|| format!("no end of the expression: {text}"))?;
        let name = name.trim();
        expanded += &value(name).ok_or_else(|| format!("{name} has no value here: {text}"))?;
        expanded += rest;
    }
    Ok(expanded)
}

/// Whether `startsWith(NAME, 'TEXT')` is true.
///
/// # Errors
/// Another condition, or a name without a value.
pub(crate) fn holds(condition: &str, value: &dyn Fn(&str) -> Option<String>) -> Result<bool, String> {
    let unknown = || format!("this program does not know the condition {condition:?}");
    let call = condition.trim().strip_prefix("startsWith(").and_then(|rest| rest.strip_suffix(')'));
    let (name, text) = call.and_then(|words| words.split_once(", ")).ok_or_else(unknown)?;
    let text = text.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\'')).ok_or_else(unknown)?;
    let value = value(name).ok_or_else(|| format!("{name} has no value here"))?;
    Ok(value.starts_with(text))
}

#[test]
fn expressions_of_the_workflow_are_expanded() {
    let value = |name: &str| (name == "github.ref").then(|| "refs/tags/v1".to_owned());
    assert_eq!(
        expand("a ${{ github.ref }} b ${{github.ref}}", &value).unwrap(),
        "a refs/tags/v1 b refs/tags/v1"
    );
    assert_eq!(expand("nothing", &value).unwrap(), "nothing");
    for wrong in ["${{ github.re }}", "${{ github.ref", "${{ toJSON(github.ref) }}"] {
        expand(wrong, &value).unwrap_err();
    }
    assert!(holds("startsWith(github.ref, 'refs/tags/v')", &value).unwrap());
    assert!(!holds("startsWith(github.ref, 'refs/heads/')", &value).unwrap());
    for wrong in ["always()", "startsWith(github.ref, name)", "startsWith(github.event, 'x')"] {
        holds(wrong, &value).unwrap_err();
    }
}
