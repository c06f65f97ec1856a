//! Decodes messages of plugins of which each element may be a few bytes long. Decoded, an element has up to half a kilobyte, so
//! a message of four megabytes could become a gigabyte. The fields are therefore counted before, as the decoder would see
//! them: in the message itself and in the messages that it contains (NRI-R5).

use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint};

use crate::api;

/// Maximum number of fields of one message with all that it contains. An update of a container has about eight, the largest
/// seccomp policies some hundred.
const FIELDS_MAX: usize = 16_384;

/// Why a message was not decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Undecodable {
    /// The bytes are not a message of this type.
    Malformed,
    /// The message has more than [`FIELDS_MAX`] fields.
    TooManyFields,
}

impl std::fmt::Display for Undecodable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Malformed => "cannot be decoded",
            Self::TooManyFields => "has too many fields",
        })
    }
}

/// The content of a field.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Shape {
    /// A message, with its fields that are messages or packed lists, by number. All others are counted once.
    Of(&'static [(u32, Shape)]),
    /// A packed list of numbers, of which each byte may be one.
    Packed,
}

/// A message without messages.
const LEAF: Shape = Shape::Of(&[]);
const RESOURCES: Shape =
    Shape::Of(&[(1, MEMORY), (2, CPU), (3, LEAF), (6, LEAF), (7, DEVICE_RULE), (8, LEAF)]);
const CPU: Shape = Shape::Of(&[(1, LEAF), (2, LEAF), (3, LEAF), (4, LEAF), (5, LEAF)]);
const MEMORY: Shape =
    Shape::Of(&[(1, LEAF), (2, LEAF), (3, LEAF), (4, LEAF), (5, LEAF), (6, LEAF), (7, LEAF), (8, LEAF)]);
const DEVICE_RULE: Shape = Shape::Of(&[(3, LEAF), (4, LEAF)]);
const DEVICE: Shape = Shape::Of(&[(5, LEAF), (6, LEAF), (7, LEAF)]);
const SYSTEM_CALL: Shape = Shape::Of(&[(3, LEAF), (4, LEAF)]);
const SECCOMP: Shape = Shape::Of(&[(2, LEAF), (7, SYSTEM_CALL)]);
const SCHEDULER: Shape = Shape::Of(&[(4, Shape::Packed)]);
const MEMORY_POLICY: Shape = Shape::Of(&[(3, Shape::Packed)]);
const RDT: Shape = Shape::Of(&[(1, LEAF), (2, LEAF), (3, LEAF)]);
const LINUX: Shape = Shape::Of(&[
    (1, DEVICE),
    (2, RESOURCES),
    (4, LEAF),
    (5, LEAF),
    (6, SECCOMP),
    (7, LEAF),
    (8, LEAF),
    (9, MAP_OF_NAMES),
    (10, SCHEDULER),
    (11, RDT),
    (12, MEMORY_POLICY),
]);
const MAP_OF_NAMES: Shape = Shape::Of(&[(2, LEAF)]);
const HOOK: Shape = Shape::Of(&[(4, LEAF)]);
const HOOKS: Shape = Shape::Of(&[(1, HOOK), (2, HOOK), (3, HOOK), (4, HOOK), (5, HOOK), (6, HOOK)]);
const ADJUSTMENT: Shape =
    Shape::Of(&[(2, LEAF), (3, LEAF), (4, LEAF), (5, HOOKS), (6, LINUX), (7, LEAF), (8, LEAF)]);
const LINUX_UPDATE: Shape = Shape::Of(&[(1, RESOURCES)]);
const UPDATE: Shape = Shape::Of(&[(2, LINUX_UPDATE)]);

/// A message that plugins send.
pub(crate) trait FromPlugin: Message + Default {
    /// The fields of the message that have fields.
    const SHAPE: Shape = LEAF;
}

impl FromPlugin for api::CreateContainerResponse {
    const SHAPE: Shape = Shape::Of(&[(1, ADJUSTMENT), (2, UPDATE), (3, LEAF)]);
}
impl FromPlugin for api::UpdateContainerResponse {
    const SHAPE: Shape = Shape::Of(&[(1, UPDATE), (2, LEAF)]);
}
impl FromPlugin for api::UpdateContainersRequest {
    const SHAPE: Shape = Shape::Of(&[(1, UPDATE), (2, LEAF)]);
}
impl FromPlugin for api::StopContainerResponse {
    const SHAPE: Shape = Shape::Of(&[(1, UPDATE)]);
}
impl FromPlugin for api::SynchronizeResponse {
    const SHAPE: Shape = Shape::Of(&[(1, UPDATE)]);
}
impl FromPlugin for api::ConfigureResponse {}
impl FromPlugin for api::RegisterPluginRequest {}
impl FromPlugin for api::ValidateContainerAdjustmentResponse {}
impl FromPlugin for api::RunPodSandboxResponse {}
impl FromPlugin for api::UpdatePodSandboxResponse {}
impl FromPlugin for api::PostUpdatePodSandboxResponse {}
impl FromPlugin for api::StopPodSandboxResponse {}
impl FromPlugin for api::RemovePodSandboxResponse {}
impl FromPlugin for api::PostCreateContainerResponse {}
impl FromPlugin for api::StartContainerResponse {}
impl FromPlugin for api::PostStartContainerResponse {}
impl FromPlugin for api::PostUpdateContainerResponse {}
impl FromPlugin for api::RemoveContainerResponse {}

/// Decodes a message, unless it has too many fields.
pub(crate) fn decode<T: FromPlugin>(bytes: &[u8]) -> Result<T, Undecodable> {
    count(bytes, T::SHAPE, FIELDS_MAX)?;
    T::decode(bytes).map_err(|_| Undecodable::Malformed)
}

/// Counts the fields of a message; returns how many of `left` are left.
fn count(mut bytes: &[u8], shape: Shape, mut left: usize) -> Result<usize, Undecodable> {
    let Shape::Of(known) = shape else {
        return left.checked_sub(bytes.len()).ok_or(Undecodable::TooManyFields);
    };
    while !bytes.is_empty() {
        left = left.checked_sub(1).ok_or(Undecodable::TooManyFields)?;
        let (number, kind) = decode_key(&mut bytes).map_err(|_| Undecodable::Malformed)?;
        let length = match kind {
            WireType::Varint => {
                decode_varint(&mut bytes).map_err(|_| Undecodable::Malformed)?;
                continue;
            }
            WireType::SixtyFourBit => 8,
            WireType::ThirtyTwoBit => 4,
            WireType::LengthDelimited => decode_varint(&mut bytes).map_err(|_| Undecodable::Malformed)?,
            // Not in any message of NRI.
            WireType::StartGroup | WireType::EndGroup => return Err(Undecodable::Malformed),
        };
        let length = usize::try_from(length).ok().filter(|length| *length <= bytes.len());
        let (field, rest) = bytes.split_at(length.ok_or(Undecodable::Malformed)?);
        bytes = rest;
        if kind != WireType::LengthDelimited {
            continue;
        }
        if let Some((_, inner)) = known.iter().find(|(of, _)| *of == number) {
            left = count(field, *inner, left)?;
        }
    }
    Ok(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_counted_wherever_they_are() {
        let hook = api::Hook { path: "/x".into(), args: vec![String::new(); 3], ..Default::default() };
        let hooks = api::Hooks { poststop: vec![hook], ..Default::default() };
        let scheduler = api::LinuxScheduler { flags: vec![1; 5], ..Default::default() };
        let linux = api::LinuxContainerAdjustment { scheduler: Some(scheduler), ..Default::default() };
        let adjust =
            api::ContainerAdjustment { hooks: Some(hooks), linux: Some(linux), ..Default::default() };
        let answer = api::CreateContainerResponse { adjust: Some(adjust), ..Default::default() };
        // adjust, hooks, poststop, path, three args; linux, scheduler, flags, five of them.
        let left = count(&answer.encode_to_vec(), api::CreateContainerResponse::SHAPE, 100);
        assert_eq!(left, Ok(100 - 7 - 8));
        assert_eq!(decode(&answer.encode_to_vec()), Ok(answer));
    }

    /// Looks like the start of a message.
    fn text() -> String {
        "0-3 \u{7f}\n\u{b}".to_owned()
    }

    fn texts() -> std::collections::BTreeMap<String, String> {
        [(text(), text())].into()
    }

    fn resources() -> api::LinuxResources {
        let number = |value| Some(api::OptionalInt64 { value });
        api::LinuxResources {
            cpu: Some(api::LinuxCpu { quota: number(1), cpus: text(), mems: text(), ..Default::default() }),
            memory: Some(api::LinuxMemory { limit: number(1), ..Default::default() }),
            hugepage_limits: vec![api::HugepageLimit { page_size: text(), limit: 1 }],
            blockio_class: Some(api::OptionalString { value: text() }),
            rdt_class: Some(api::OptionalString { value: text() }),
            unified: texts(),
            devices: vec![api::LinuxDeviceCgroup {
                r#type: text(),
                major: number(1),
                access: text(),
                ..Default::default()
            }],
            pids: Some(api::LinuxPids { limit: 1 }),
        }
    }

    fn linux() -> api::LinuxContainerAdjustment {
        let seccomp = api::LinuxSeccomp {
            default_action: text(),
            default_errno: Some(api::OptionalUInt32 { value: 1 }),
            architectures: vec![text()],
            flags: vec![text()],
            listener_path: text(),
            listener_metadata: text(),
            syscalls: vec![api::LinuxSyscall {
                names: vec![text()],
                action: text(),
                errno_ret: Some(api::OptionalUInt32 { value: 1 }),
                args: vec![api::LinuxSeccompArg { op: text(), ..Default::default() }],
            }],
        };
        api::LinuxContainerAdjustment {
            devices: vec![api::LinuxDevice { path: text(), r#type: text(), ..Default::default() }],
            resources: Some(resources()),
            cgroups_path: text(),
            oom_score_adj: Some(api::OptionalInt { value: 1 }),
            io_priority: Some(api::LinuxIoPriority { class: 1, priority: 1 }),
            seccomp_policy: Some(seccomp),
            namespaces: vec![api::LinuxNamespace { r#type: text(), path: text() }],
            sysctl: texts(),
            net_devices: [(text(), api::LinuxNetDevice { name: text() })].into(),
            scheduler: Some(api::LinuxScheduler { flags: vec![1], ..Default::default() }),
            rdt: Some(api::LinuxRdt {
                clos_id: Some(api::OptionalString { value: text() }),
                schemata: Some(api::OptionalRepeatedString { value: vec![text()] }),
                enable_monitoring: Some(api::OptionalBool { value: true }),
                remove: true,
            }),
            memory_policy: Some(api::LinuxMemoryPolicy {
                nodes: text(),
                flags: vec![1],
                ..Default::default()
            }),
        }
    }

    #[test]
    fn no_text_field_is_counted_as_a_message() {
        let hook = api::Hook { path: text(), args: vec![text()], env: vec![text()], timeout: None };
        let adjust = api::ContainerAdjustment {
            annotations: texts(),
            mounts: vec![api::Mount {
                destination: text(),
                r#type: text(),
                source: text(),
                options: vec![text()],
            }],
            env: vec![api::KeyValue { key: text(), value: text() }],
            hooks: Some(api::Hooks { prestart: vec![hook], ..Default::default() }),
            linux: Some(linux()),
            rlimits: vec![api::PosixRlimit { r#type: text(), hard: 1, soft: 1 }],
            cdi_devices: vec![api::CdiDevice { name: text() }],
            args: vec![text()],
        };
        let answer = api::CreateContainerResponse {
            adjust: Some(adjust),
            update: vec![api::ContainerUpdate {
                container_id: text(),
                linux: Some(api::LinuxContainerUpdate { resources: Some(resources()) }),
                ignore_failure: true,
            }],
            evict: vec![api::ContainerEviction { container_id: text(), reason: text() }],
        };
        assert_eq!(decode(&answer.encode_to_vec()), Ok(answer));
    }

    /// Tests rule NRI-R5 of docs/specs/nri.md.
    #[test]
    fn too_many_elements_are_refused() {
        let update =
            |count| api::StopContainerResponse { update: vec![api::ContainerUpdate::default(); count] };
        let decoded = |count| decode::<api::StopContainerResponse>(&update(count).encode_to_vec());
        assert!(decoded(FIELDS_MAX).is_ok());
        assert_eq!(decoded(FIELDS_MAX + 1), Err(Undecodable::TooManyFields));
        // A long text is one field, whatever is in it.
        let annotations = [("k".to_owned(), "x".repeat(3 << 20))].into();
        let adjust = Some(api::ContainerAdjustment { annotations, ..Default::default() });
        let answer = api::CreateContainerResponse { adjust, ..Default::default() };
        assert_eq!(decode(&answer.encode_to_vec()), Ok(answer));
    }

    #[test]
    fn malformed_messages_are_refused() {
        for bytes in [&[255; 7][..], &[10], &[10, 5, 1], &[11], &[9, 1, 2], &[0x0a, 0x80]] {
            let decoded = decode::<api::CreateContainerResponse>(bytes);
            assert_eq!(decoded, Err(Undecodable::Malformed), "{bytes:?}");
        }
    }
}
