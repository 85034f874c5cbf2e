//! Client of one connected device plugin.
//!
//! Every call has a deadline, except `ListAndWatch`. The answer to `Allocate` stays encoded, because it may have unknown
//! fields: it is stored, and a kubelet that takes over reads it.

use std::sync::Arc;
use std::time::Duration;

use devlet_core::device_plugin::inventory::PluginOptions;
use devlet_core::device_plugin::list::DeviceList;
use devlet_core::{DeviceId, PreferenceQuery};
use devlet_kubelet_api::device_plugin::v1beta1::device_plugin_client::DevicePluginClient;
use devlet_kubelet_api::device_plugin::{v1alpha2, v1beta1};
use devlet_uds::PeerConnection;
use devlet_uds::channel::Channel;
use prost::Message as _;
use prost::bytes::Bytes;
use tonic::codec::Streaming;
use tonic::{Code, Request, Status};

use super::wire;
use crate::grpc::call::{self, CallDeadline, CallError, InvalidAnswer};
use crate::grpc::fields::WireError;
use crate::grpc::oversize::is_too_large;
use crate::limits::{Limit, LimitExceeded, Limits, MAX_SHORT_MESSAGE};
use crate::metrics::Calls;
use crate::peer_text::shorten_status;

/// The version of the protocol that a plugin uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// The current version.
    V1beta1,
    /// The version of 2017: without options, `GetPreferredAllocation` and `PreStartContainer`.
    V1alpha2,
}

/// Calls one connected plugin.
#[derive(Debug, Clone)]
pub struct PluginClient {
    dialed: PeerConnection,
    api: Api,
    calls: Calls,
    limits: Arc<Limits>,
}

impl PluginClient {
    /// Creates a client. `calls` measures its calls.
    pub(crate) fn new(dialed: &PeerConnection, api: Api, calls: Calls, limits: &Limits) -> Self {
        Self {
            dialed: dialed.clone(),
            api,
            calls,
            limits: Arc::new(limits.clone()),
        }
    }

    fn client(&self, (_, max_bytes): (Limit, usize)) -> DevicePluginClient<Channel> {
        DevicePluginClient::new(self.dialed.channel.clone()).max_decoding_message_size(max_bytes)
    }

    /// Returns the limit of short answers.
    fn short_limit(&self) -> (Limit, usize) {
        (Limit::FIXED, MAX_SHORT_MESSAGE)
    }

    /// Returns the limit of answers that name devices.
    fn long_limit(&self) -> (Limit, usize) {
        (Limit::LIST_BYTES, self.limits.list_bytes)
    }

    /// Calls `GetDevicePluginOptions`.
    pub async fn options(&self, deadline: Duration) -> Result<PluginOptions, CallError> {
        if self.api == Api::V1alpha2 {
            return Ok(PluginOptions::default());
        }
        let mut client = self.client(self.short_limit());
        let call = client.get_device_plugin_options(v1beta1::Empty {});
        let options = self
            .call_with_deadline(
                "GetDevicePluginOptions",
                CallDeadline::of(deadline),
                self.short_limit(),
                call,
            )
            .await?;
        Ok(PluginOptions {
            pre_start_required: options.pre_start_required,
            preferred_allocation: options.get_preferred_allocation_available,
        })
    }

    /// Returns the measurements of the calls.
    pub(crate) fn calls(&self) -> &Calls {
        &self.calls
    }

    /// Calls `ListAndWatch`.
    pub async fn lists(&self) -> Result<Lists, ListError> {
        let path = match self.api {
            Api::V1beta1 => "/v1beta1.DevicePlugin/ListAndWatch",
            Api::V1alpha2 => "/deviceplugin.DevicePlugin/ListAndWatch",
        };
        let request = Request::new(Bytes::new());
        let stream = call::stream(&self.dialed.channel, path, request, self.limits.list_bytes).await?;
        Ok(Lists {
            stream,
            api: self.api,
            limits: Arc::clone(&self.limits),
        })
    }

    /// Calls `GetPreferredAllocation`. Returns the devices that the plugin prefers.
    pub async fn preferred(
        &self,
        query: &PreferenceQuery,
        deadline: CallDeadline,
    ) -> Result<Vec<DeviceId>, CallError> {
        let request = v1beta1::PreferredAllocationRequest {
            container_requests: vec![v1beta1::ContainerPreferredAllocationRequest {
                available_device_ids: texts(&query.available),
                must_include_device_ids: texts(&query.must_include),
                allocation_size: i32::try_from(query.size).unwrap_or(i32::MAX),
            }],
        };
        let mut client = self.client(self.long_limit());
        let call = client.get_preferred_allocation(request);
        let answer = self
            .call_with_deadline("GetPreferredAllocation", deadline, self.long_limit(), call)
            .await?;
        let first = answer.container_responses.into_iter().next();
        Ok(first
            .into_iter()
            .flat_map(|each| each.device_ids)
            .map(DeviceId::from)
            .collect())
    }

    /// Calls `Allocate` for a container. Returns its encoded `ContainerAllocateResponse`.
    pub async fn allocate(&self, devices: &[DeviceId], deadline: CallDeadline) -> Result<Bytes, CallError> {
        const METHOD: &str = "Allocate";
        let (path, request) = match self.api {
            Api::V1beta1 => {
                let container = v1beta1::ContainerAllocateRequest {
                    devices_ids: texts(devices),
                };
                let request = v1beta1::AllocateRequest {
                    container_requests: vec![container],
                };
                ("/v1beta1.DevicePlugin/Allocate", request.encode_to_vec())
            }
            Api::V1alpha2 => {
                let request = v1alpha2::AllocateRequest {
                    devices_ids: texts(devices),
                };
                ("/deviceplugin.DevicePlugin/Allocate", request.encode_to_vec())
            }
        };
        let limit = (Limit::ANSWER_BYTES, self.limits.answer_bytes);
        let request = Request::new(Bytes::from(request));
        let call = call::unary(&self.dialed.channel, path, request, limit.1);
        let answer = self.call_with_deadline(METHOD, deadline, limit, call).await?;
        if self.api == Api::V1alpha2 {
            return Ok(answer);
        }
        let container = match AllocateAnswer::decode(answer) {
            Ok(answer) => answer
                .containers
                .into_iter()
                .next()
                .ok_or(InvalidAnswer::NoContainer),
            Err(error) => Err(InvalidAnswer::Damaged(error.to_string())),
        };
        container.map_err(|problem| {
            let error = CallError::Invalid {
                method: METHOD,
                problem,
            };
            self.calls.failed(&error);
            error
        })
    }

    /// Calls `PreStartContainer`.
    pub async fn pre_start(&self, devices: &[DeviceId], deadline: CallDeadline) -> Result<(), CallError> {
        if self.api == Api::V1alpha2 {
            return Ok(());
        }
        let mut client = self.client(self.short_limit());
        let request = v1beta1::PreStartContainerRequest {
            devices_ids: texts(devices),
        };
        let call = client.pre_start_container(request);
        self.call_with_deadline("PreStartContainer", deadline, self.short_limit(), call)
            .await?;
        Ok(())
    }

    async fn call_with_deadline<T>(
        &self,
        method: &'static str,
        deadline: CallDeadline,
        limit: (Limit, usize),
        call: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, CallError> {
        let (took, ended) = call::call_with_deadline(method, deadline, limit, &self.dialed, call).await;
        self.calls.took(method, took);
        ended.inspect_err(|error| self.calls.failed(error))
    }
}

fn texts(devices: &[DeviceId]) -> Vec<String> {
    devices.iter().map(ToString::to_string).collect()
}

/// Reason why a stream of lists has ended.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The plugin ended the stream, or the connection was lost.
    #[error("{} ({:?})", .0.message(), .0.code())]
    Ended(#[source] Status),
    /// A list cannot be decoded.
    #[error("the list is damaged: {0}")]
    Damaged(#[from] WireError),
    /// A list exceeds a limit.
    #[error(transparent)]
    LimitExceeded(#[from] LimitExceeded),
}

impl From<Status> for ListError {
    fn from(status: Status) -> Self {
        Self::Ended(shorten_status(&status))
    }
}

impl ListError {
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Ended(status) => status.code(),
            Self::Damaged(_) => Code::Internal,
            Self::LimitExceeded(_) => Code::ResourceExhausted,
        }
    }
}

/// A plugin's device lists.
#[derive(Debug)]
pub struct Lists {
    stream: Streaming<Bytes>,
    api: Api,
    limits: Arc<Limits>,
}

impl Lists {
    /// Returns the next list, still encoded; `None` at the end of the stream.
    pub async fn next(&mut self) -> Result<Option<RawList>, ListError> {
        let message = self.stream.message().await.map_err(|status| {
            if is_too_large(&status) {
                let max = self.limits.list_bytes;
                return Limit::LIST_BYTES.exceeded("the list is too large", max).into();
            }
            ListError::from(status)
        })?;
        Ok(message.map(|bytes| RawList {
            bytes,
            api: self.api,
            limits: Arc::clone(&self.limits),
        }))
    }
}

/// An encoded list.
#[derive(Debug)]
pub struct RawList {
    bytes: Bytes,
    api: Api,
    limits: Arc<Limits>,
}

impl RawList {
    /// Returns the length in bytes.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// Decodes the list. The second value is the number of entries that name a device again. Takes a while if the list is
    /// long.
    pub(crate) fn decode(self) -> Result<(DeviceList, usize), ListError> {
        let device = match self.api {
            Api::V1beta1 => wire::device,
            Api::V1alpha2 => wire::device_v1alpha2,
        };
        Ok(DeviceList::new(wire::devices(self.bytes, device, &self.limits)?))
    }
}

/// `AllocateResponse` with the containers' parts still encoded; both are the same on the wire.
#[derive(Clone, PartialEq, prost::Message)]
struct AllocateAnswer {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    containers: Vec<Bytes>,
}
