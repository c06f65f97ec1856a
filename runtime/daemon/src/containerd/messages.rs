//! The used fields of containerd's messages (containerd API 1.8 and 1.10: the packages `containerd.services.version.v1`,
//! `containerd.services.containers.v1`, `containerd.services.tasks.v1`, `containerd.v1.types`). All other fields are omitted,
//! which in proto3 means that they are empty.

use std::collections::BTreeMap;

/// Message `GetContainerRequest`, and `GetRequest` of the tasks service: the ID is the first field of both.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct GetRequest {
    #[prost(string, tag = "1")]
    pub(super) id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct VersionResponse {
    #[prost(string, tag = "1")]
    pub(super) version: String,
    #[prost(string, tag = "2")]
    pub(super) revision: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct GetContainerResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) container: Option<Container>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Container {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(btree_map = "string, string", tag = "2")]
    pub(super) labels: BTreeMap<String, String>,
    #[prost(string, tag = "3")]
    pub(super) image: String,
    #[prost(message, optional, tag = "4")]
    pub(super) runtime: Option<Runtime>,
    #[prost(message, optional, tag = "5")]
    pub(super) spec: Option<Any>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Runtime {
    #[prost(string, tag = "1")]
    pub(super) name: String,
}

/// Message `google.protobuf.Any`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Any {
    #[prost(string, tag = "1")]
    pub(super) type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) value: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct GetTaskResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) process: Option<Process>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Process {
    #[prost(string, tag = "1")]
    pub(super) container_id: String,
    #[prost(string, tag = "2")]
    pub(super) id: String,
    #[prost(uint32, tag = "3")]
    pub(super) pid: u32,
    #[prost(enumeration = "TaskStatus", tag = "4")]
    pub(super) status: i32,
    #[prost(uint32, tag = "9")]
    pub(super) exit_status: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
pub(super) enum TaskStatus {
    Unknown = 0,
    Created = 1,
    Running = 2,
    Stopped = 3,
}
