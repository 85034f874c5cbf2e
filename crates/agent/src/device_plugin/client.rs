//! What is called on a device plugin.
//!
//! Every call but the endless one has a deadline. The answer to `Allocate` is kept as the bytes that came: it is
//! stored, handed to a kubelet one day, and may have fields that we do not know.

use std::sync::Arc;
use std::time::Duration;

use devlet_core::device_plugin::inventory::PluginOptions;
use devlet_core::device_plugin::list::DeviceList;
use devlet_core::{DeviceId, Question};
use devlet_kubelet_api::device_plugin::v1beta1::device_plugin_client::DevicePluginClient;
use devlet_kubelet_api::device_plugin::{v1alpha2, v1beta1};
use http::uri::PathAndQuery;
use prost::Message as _;
use prost::bytes::{Buf as _, Bytes};
use tokio::time::{Instant, timeout_at};
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder, Streaming};
use tonic::{Code, Request, Status};

use super::wire;
use crate::grpc::channel::Channel;
use crate::grpc::oversize::is_too_large;
use crate::grpc::uds::{Dialed, Gone};
use crate::limits::{Limit, Limits, OverLimit};
use crate::metrics::Calls;

/// How long a connection may take to end after a call on it failed for that reason.
const FAREWELL: Duration = Duration::from_secs(1);

/// Which generation of the protocol a plugin speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// Today's.
    V1beta1,
    /// Of 2017: no options, no advice, no call before the start.
    V1alpha2,
}

/// Why a call did not end well.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CallError {
    /// The plugin did not answer in time.
    #[error("{method} was not answered within {} s", .deadline.as_secs_f32())]
    TimedOut {
        /// The call.
        method: &'static str,
        /// How long we waited.
        deadline: Duration,
    },
    /// Whoever waits for the answer cannot wait any longer; the plugin might have had more time.
    #[error("{method} was not answered before the caller's deadline, {:.1} s after the call; wait longer", .waited.as_secs_f32())]
    CutShort {
        /// The call.
        method: &'static str,
        /// How long the plugin had.
        waited: Duration,
    },
    /// The plugin went away under the call.
    #[error("{method}: the plugin went away")]
    Gone {
        /// The call.
        method: &'static str,
    },
    /// The plugin refused.
    #[error("{method}: {} ({:?})", .status.message(), .status.code())]
    Refused {
        /// The call.
        method: &'static str,
        /// The answer.
        status: Box<Status>,
    },
    /// The plugin answered something that is no answer.
    #[error("{method}: {problem}")]
    Invalid {
        /// The call.
        method: &'static str,
        /// What is wrong with it.
        problem: InvalidAnswer,
    },
}

/// An answer that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidAnswer {
    /// There is none for the container.
    #[error("the plugin answered for no container")]
    NoContainer,
    /// It is not what it should be.
    #[error("the answer is damaged: {0}")]
    Damaged(String),
    /// There is too much of it.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
}

impl CallError {
    /// Whether the plugin went away, so that waiting for it helps.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }

    /// Whether the plugin said nothing in the time that it had.
    pub fn is_silence(&self) -> bool {
        matches!(self, Self::TimedOut { .. } | Self::CutShort { .. })
    }
}

/// What a plugin is given to answer, however little time its caller has left.
pub const LEAST: Duration = Duration::from_secs(1);

/// How long a call may take.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// The plugin's own deadline.
    pub own: Duration,
    /// The deadline of whoever waits for the answer. A plugin that is there has [`LEAST`] all the same: somebody who
    /// does not want to wait for plugins that are not there does not mean those.
    pub caller: Option<Instant>,
}

impl Patience {
    /// Nobody in particular waits.
    fn of(own: Duration) -> Self {
        Self { own, caller: None }
    }
}

/// A way to call one connected plugin.
#[derive(Debug, Clone)]
pub struct PluginClient {
    channel: Channel,
    gone: Gone,
    api: Api,
    calls: Calls,
    limits: Arc<Limits>,
}

impl PluginClient {
    /// `calls` measures what is called.
    pub fn new(dialed: &Dialed, api: Api, calls: Calls, limits: &Limits) -> Self {
        Self {
            channel: dialed.channel.clone(),
            gone: dialed.gone(),
            api,
            calls,
            limits: Arc::new(limits.clone()),
        }
    }

    fn client(&self, (_, largest): (Limit, usize)) -> DevicePluginClient<Channel> {
        DevicePluginClient::new(self.channel.clone()).max_decoding_message_size(largest)
    }

    /// The limit of short answers.
    fn short(&self) -> (Limit, usize) {
        (Limit::REGISTRATION_BYTES, self.limits.registration_bytes)
    }

    /// The limit of answers that name devices.
    fn long(&self) -> (Limit, usize) {
        (Limit::LIST_BYTES, self.limits.list_bytes)
    }

    /// What the plugin wants to be asked.
    pub async fn options(&self, deadline: Duration) -> Result<PluginOptions, CallError> {
        if self.api == Api::V1alpha2 {
            return Ok(PluginOptions::default());
        }
        let mut client = self.client(self.short());
        let call = client.get_device_plugin_options(v1beta1::Empty {});
        let options = self
            .within(
                "GetDevicePluginOptions",
                Patience::of(deadline),
                self.short(),
                call,
            )
            .await?;
        Ok(PluginOptions {
            pre_start_required: options.pre_start_required,
            preferred_allocation: options.get_preferred_allocation_available,
        })
    }

    /// Measures what is called.
    pub(crate) fn calls(&self) -> &Calls {
        &self.calls
    }

    /// The plugin's device lists, as they come.
    pub async fn lists(&self) -> Result<Lists, ListError> {
        let path = match self.api {
            Api::V1beta1 => "/v1beta1.DevicePlugin/ListAndWatch",
            Api::V1alpha2 => "/deviceplugin.DevicePlugin/ListAndWatch",
        };
        let mut grpc = self.grpc(self.limits.list_bytes).await?;
        let path = PathAndQuery::from_static(path);
        let answer = grpc.server_streaming(Request::new(Bytes::new()), path, AsBytes);
        Ok(Lists {
            stream: answer.await?.into_inner(),
            api: self.api,
            limits: Arc::clone(&self.limits),
        })
    }

    /// Which devices the plugin would choose.
    pub async fn preferred(
        &self,
        question: &Question,
        patience: Patience,
    ) -> Result<Vec<DeviceId>, CallError> {
        let request = v1beta1::PreferredAllocationRequest {
            container_requests: vec![v1beta1::ContainerPreferredAllocationRequest {
                available_device_ids: texts(&question.available),
                must_include_device_ids: texts(&question.must_include),
                allocation_size: i32::try_from(question.size).unwrap_or(i32::MAX),
            }],
        };
        let mut client = self.client(self.long());
        let call = client.get_preferred_allocation(request);
        let answer = self
            .within("GetPreferredAllocation", patience, self.long(), call)
            .await?;
        let first = answer.container_responses.into_iter().next();
        Ok(first
            .into_iter()
            .flat_map(|each| each.device_ids)
            .map(DeviceId::from)
            .collect())
    }

    /// Hands devices to a container; the answer as bytes of a `ContainerAllocateResponse`.
    pub async fn allocate(&self, devices: &[DeviceId], patience: Patience) -> Result<Bytes, CallError> {
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
        let call = self.call_with_bytes(path, request);
        let answer = self.within(METHOD, patience, limit, call).await?;
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

    /// Tells the plugin that a container is about to start.
    pub async fn pre_start(&self, devices: &[DeviceId], patience: Patience) -> Result<(), CallError> {
        if self.api == Api::V1alpha2 {
            return Ok(());
        }
        let mut client = self.client(self.short());
        let request = v1beta1::PreStartContainerRequest {
            devices_ids: texts(devices),
        };
        let call = client.pre_start_container(request);
        self.within("PreStartContainer", patience, self.short(), call)
            .await?;
        Ok(())
    }

    async fn within<T>(
        &self,
        method: &'static str,
        Patience { own, caller }: Patience,
        limit: (Limit, usize),
        call: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, CallError> {
        let called = Instant::now();
        let own_end = called + own;
        let end = caller.map_or(own_end, |caller| caller.max(called + LEAST).min(own_end));
        let ended = timeout_at(end, call).await;
        self.calls.took(method, called.elapsed());
        let error = match ended {
            Err(_) if end < own_end => CallError::CutShort {
                method,
                waited: called.elapsed(),
            },
            Err(_) => CallError::TimedOut {
                method,
                deadline: own,
            },
            Ok(Ok(response)) => return Ok(response.into_inner()),
            Ok(Err(status)) => self.explained(method, status, caller, limit).await,
        };
        self.calls.failed(&error);
        Err(error)
    }

    async fn explained(
        &self,
        method: &'static str,
        status: Status,
        caller: Option<Instant>,
        (limit, largest): (Limit, usize),
    ) -> CallError {
        if is_too_large(&status) {
            let problem = limit.exceeded("the answer is too large", largest).into();
            return CallError::Invalid { method, problem };
        }
        // A plugin may say so itself; only if its connection ends, too, there is something to wait for.
        let farewell = Instant::now() + FAREWELL;
        let farewell = caller.map_or(farewell, |caller| caller.min(farewell));
        let looks_gone = matches!(status.code(), Code::Unavailable | Code::Cancelled);
        if looks_gone && timeout_at(farewell, self.gone.wait()).await.is_ok() {
            return CallError::Gone { method };
        }
        CallError::Refused {
            method,
            status: Box::new(status),
        }
    }

    async fn call_with_bytes(
        &self,
        path: &'static str,
        request: Vec<u8>,
    ) -> Result<tonic::Response<Bytes>, Status> {
        let mut grpc = self.grpc(self.limits.answer_bytes).await?;
        let path = PathAndQuery::from_static(path);
        grpc.unary(Request::new(Bytes::from(request)), path, AsBytes)
            .await
    }

    async fn grpc(&self, largest: usize) -> Result<Grpc<Channel>, Status> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(largest);
        grpc.ready()
            .await
            .map_err(|error| Status::unavailable(error.to_string()))?;
        Ok(grpc)
    }
}

fn texts(devices: &[DeviceId]) -> Vec<String> {
    devices.iter().map(ToString::to_string).collect()
}

/// Why there are no more lists.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The plugin, or the way to it, says so.
    #[error("{} ({:?})", .0.message(), .0.code())]
    Ended(#[from] Status),
    /// The list is none.
    #[error("the list is damaged: {0}")]
    Damaged(#[from] prost::DecodeError),
    /// There is too much of it.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
}

impl ListError {
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Ended(status) => status.code(),
            Self::Damaged(_) => Code::Internal,
            Self::OverLimit(_) => Code::ResourceExhausted,
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
    /// The next list, not looked into yet; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<RawList>, ListError> {
        let message = self.stream.message().await.map_err(|status| {
            if is_too_large(&status) {
                let most = self.limits.list_bytes;
                return Limit::LIST_BYTES.exceeded("the list is too large", most).into();
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

/// A list as it came.
#[derive(Debug)]
pub struct RawList {
    bytes: Bytes,
    api: Api,
    limits: Arc<Limits>,
}

impl RawList {
    /// How many bytes it has.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// What it says, with the number of devices that it named again. This takes time if the list is long.
    pub fn decode(self) -> Result<(DeviceList, usize), ListError> {
        Ok(match self.api {
            Api::V1beta1 => {
                let message = v1beta1::ListAndWatchResponse::decode(self.bytes)?;
                wire::check(message.devices.iter().map(wire::outline), &self.limits)?;
                wire::device_list(message)
            }
            Api::V1alpha2 => {
                let message = v1alpha2::ListAndWatchResponse::decode(self.bytes)?;
                wire::check(message.devices.iter().map(wire::outline_2017), &self.limits)?;
                wire::device_list_2017(message)
            }
        })
    }
}

/// `AllocateResponse` with the containers' parts left as bytes: on the wire there is no difference.
#[derive(Clone, PartialEq, prost::Message)]
struct AllocateAnswer {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    containers: Vec<Bytes>,
}

/// Messages as the bytes that they are.
#[derive(Debug, Clone, Copy, Default)]
struct AsBytes;

impl Codec for AsBytes {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for AsBytes {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        use prost::bytes::BufMut as _;
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for AsBytes {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
