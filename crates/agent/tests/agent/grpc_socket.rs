//! Listening, dialling and serving on real sockets.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener as StdListener, UnixStream as StdStream};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use devlet_kubelet_api::device_plugin::v1beta1::device_plugin_client::DevicePluginClient;
use devlet_kubelet_api::device_plugin::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use devlet_kubelet_api::device_plugin::v1beta1::registration_client::RegistrationClient;
use devlet_kubelet_api::device_plugin::v1beta1::registration_server::{Registration, RegistrationServer};
use devlet_kubelet_api::device_plugin::v1beta1::{
    AllocateRequest, AllocateResponse, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse, RegisterRequest,
};
use devlet_uds::channel::Channel;
use devlet_uds::server::{OnRefusal, Refusal, ServeError, ServerLimits, ignore_refusals, serve};
use devlet_uds::{
    DEFAULT_MODE, DialError, ListenError, Listener, PATH_LIMIT, PeerConnection, PeerCred, ReadLimits,
    connect, connect_limited, listen,
};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_stream::{Stream, StreamExt};
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status};

const LONG: Duration = Duration::from_secs(30);

/// Creates a directory with a short path.
fn directory() -> TempDir {
    tempfile::Builder::new()
        .prefix("grpc")
        .tempdir_in("/tmp")
        .expect("a directory")
}

fn soon() -> Instant {
    Instant::now() + LONG
}

fn me() -> (u32, u32) {
    let directory = directory();
    let metadata = directory.path().metadata().expect("metadata");
    (metadata.uid(), metadata.gid())
}

/// Records each call and its caller, and answers when it may.
struct Recorder {
    calls: mpsc::UnboundedSender<(PeerCred, String)>,
    /// A call with the endpoint `wait` waits for this.
    go_on: Arc<Notify>,
}

#[tonic::async_trait]
impl Registration for Recorder {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let peer = *request
            .extensions()
            .get::<PeerCred>()
            .ok_or_else(|| Status::internal("no peer"))?;
        let endpoint = request.into_inner().endpoint;
        let waits = endpoint == "wait";
        self.calls
            .send((peer, endpoint))
            .map_err(|_| Status::internal("the test has ended"))?;
        if waits {
            self.go_on.notified().await;
        }
        Ok(Response::new(Empty {}))
    }
}

struct Running {
    calls: mpsc::UnboundedReceiver<(PeerCred, String)>,
    go_on: Arc<Notify>,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), ServeError>>,
}

fn run(listener: Listener, limits: ServerLimits) -> Running {
    run_reporting(listener, limits, ignore_refusals())
}

/// Returns a callback for refusals, and the refusals.
fn reported() -> (OnRefusal, mpsc::UnboundedReceiver<Refusal>) {
    let (sender, refusals) = mpsc::unbounded_channel();
    let on_refusal = Arc::new(move |refusal| _ = sender.send(refusal));
    (on_refusal, refusals)
}

fn run_reporting(listener: Listener, limits: ServerLimits, on_refusal: OnRefusal) -> Running {
    let (sender, calls) = mpsc::unbounded_channel();
    let go_on = Arc::new(Notify::new());
    let (stop, stopped) = oneshot::channel::<()>();
    let recorder = Recorder {
        calls: sender,
        go_on: go_on.clone(),
    };
    let routes = Routes::new(RegistrationServer::new(recorder).max_decoding_message_size(usize::MAX));
    let ended = tokio::spawn(serve(listener, routes, limits, on_refusal, async {
        let _ = stopped.await;
    }));
    Running {
        calls,
        go_on,
        stop,
        ended,
    }
}

fn run_at(path: &Path) -> Running {
    run(
        listen(path, DEFAULT_MODE).expect("listens"),
        ServerLimits::default(),
    )
}

async fn register(dialed: &PeerConnection, endpoint: &str) -> Result<(), Status> {
    let request = RegisterRequest {
        endpoint: endpoint.to_owned(),
        ..RegisterRequest::default()
    };
    let mut client = RegistrationClient::new(dialed.channel.clone());
    client.register(request).await.map(|_| ())
}

fn socket(directory: &TempDir) -> PathBuf {
    directory.path().join("kubelet.sock")
}

fn names(directory: &TempDir) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("entries");
    entries
        .map(|entry| entry.expect("entry").file_name().into_string().expect("text"))
        .collect()
}

fn leave_stale_socket(path: &Path) {
    drop(StdListener::bind(path).expect("binds"));
    assert!(path.exists());
}

#[tokio::test]
async fn a_call_arrives_with_the_callers_credentials() {
    let directory = directory();
    let mut server = run_at(&socket(&directory));
    let dialed = connect(socket(&directory), soon()).await.expect("dials");

    register(&dialed, "x.sock").await.expect("registers");

    let (uid, gid) = me();
    let this = PeerCred {
        uid,
        gid,
        pid: i32::try_from(std::process::id()).ok(),
    };
    assert_eq!(server.calls.recv().await, Some((this, "x.sock".to_owned())));
    assert_eq!(dialed.peer, this);
    assert_eq!(dialed.owner, uid);
}

#[tokio::test]
async fn the_mode_is_exact_and_nothing_else_is_left_behind() {
    let directory = directory();
    for mode in [0o660, 0o600, 0o666] {
        let listener = listen(socket(&directory), mode).expect("listens");
        let metadata = socket(&directory).metadata().expect("metadata");
        assert_eq!(metadata.permissions().mode() & 0o7777, mode);
        assert_eq!(names(&directory), ["kubelet.sock"]);
        drop(listener);
        assert!(names(&directory).is_empty(), "the socket is removed");
    }
}

#[tokio::test]
async fn a_stale_socket_is_replaced() {
    let directory = directory();
    leave_stale_socket(&socket(&directory));
    let mut server = run_at(&socket(&directory));
    let dialed = connect(socket(&directory), soon()).await.expect("dials");
    register(&dialed, "a").await.expect("registers");
    assert!(server.calls.recv().await.is_some());
    assert_eq!(names(&directory), ["kubelet.sock"]);
}

#[tokio::test]
async fn the_socket_of_a_live_process_is_never_replaced() {
    let directory = directory();
    let live = StdListener::bind(socket(&directory)).expect("binds");
    let inode = socket(&directory).metadata().expect("metadata").ino();

    let refused = listen(socket(&directory), DEFAULT_MODE).expect_err("in use");

    let ListenError::InUse { peer: Some(peer), .. } = &refused else {
        panic!("{refused:?}")
    };
    assert_eq!(peer.pid, i32::try_from(std::process::id()).ok());
    assert!(
        refused
            .to_string()
            .contains(&format!("pid {}", std::process::id())),
        "{refused}"
    );
    assert_eq!(socket(&directory).metadata().expect("metadata").ino(), inode);
    assert_eq!(names(&directory), ["kubelet.sock"]);
    drop(live);
}

#[tokio::test]
async fn of_many_that_start_at_once_over_a_stale_socket_one_wins() {
    for _ in 0..20 {
        let directory = directory();
        leave_stale_socket(&socket(&directory));
        let path = socket(&directory);
        let starts: Vec<_> = (0..4)
            .map(|_| {
                let path = path.clone();
                tokio::task::spawn_blocking(move || listen(path, DEFAULT_MODE))
            })
            .collect();
        let mut won = Vec::new();
        for start in starts {
            match start.await.expect("runs") {
                Ok(listener) => won.push(listener),
                Err(error) => assert!(matches!(error, ListenError::InUse { .. }), "{error}"),
            }
        }
        assert_eq!(won.len(), 1);
        assert_eq!(names(&directory), ["kubelet.sock"]);
        StdStream::connect(&path).expect("the winner is there");
    }
}

#[tokio::test]
async fn a_listener_removes_only_its_own_socket() {
    let directory = directory();
    let first = listen(socket(&directory), DEFAULT_MODE).expect("listens");
    std::fs::remove_file(socket(&directory)).expect("removes");
    let second = listen(socket(&directory), DEFAULT_MODE).expect("listens");
    drop(first);
    assert_eq!(names(&directory), ["kubelet.sock"]);
    drop(second);
}

#[tokio::test]
async fn files_that_are_not_sockets_are_left_alone() {
    let directory = directory();
    std::fs::write(socket(&directory), "precious").expect("writes");
    let refused = listen(socket(&directory), DEFAULT_MODE).expect_err("a file");
    assert!(matches!(refused, ListenError::NotASocket { .. }), "{refused}");
    assert_eq!(
        std::fs::read_to_string(socket(&directory)).expect("reads"),
        "precious"
    );
    let refused = connect(socket(&directory), soon()).await.expect_err("a file");
    assert!(matches!(refused, DialError::NotASocket { .. }), "{refused}");

    let link = directory.path().join("link.sock");
    let target = directory.path().join("target.sock");
    let _live = StdListener::bind(&target).expect("binds");
    symlink(&target, &link).expect("links");
    let refused = listen(&link, DEFAULT_MODE).expect_err("a link");
    assert!(matches!(refused, ListenError::NotASocket { .. }), "{refused}");
    let refused = connect(&link, soon()).await.expect_err("a link");
    assert!(matches!(refused, DialError::Symlink { .. }), "{refused}");
}

#[tokio::test]
async fn a_path_may_have_107_bytes_and_not_one_more() {
    let directory = directory();
    let room = PATH_LIMIT - directory.path().as_os_str().len() - 1;
    let longest = directory.path().join("s".repeat(room));
    let _server = run_at(&longest);
    let dialed = connect(&longest, soon()).await.expect("dials");
    register(&dialed, "a").await.expect("registers");
    StdStream::connect(&longest).expect("others can dial it as well");

    let refused = listen(directory.path().join("s".repeat(room + 1)), DEFAULT_MODE).expect_err("too long");
    assert!(
        matches!(refused, ListenError::PathTooLong { length: 108, .. }),
        "{refused}"
    );
    assert!(
        refused.to_string().contains("has 108 bytes, 107 are possible"),
        "{refused}"
    );
    let refused = connect("/".to_owned() + &"s".repeat(5000), soon())
        .await
        .expect_err("too long");
    assert!(
        matches!(refused, DialError::PathTooLong { length: 5001 }),
        "{refused}"
    );
}

#[tokio::test]
async fn a_socket_in_a_deep_directory_can_be_dialled() {
    let directory = directory();
    let deep = directory.path().join("d".repeat(200));
    std::fs::create_dir(&deep).expect("creates");
    let _server = run_at(&socket(&directory));
    std::fs::hard_link(socket(&directory), deep.join("plugin.sock")).expect("links");
    let dialed = connect(deep.join("plugin.sock"), soon()).await.expect("dials");
    register(&dialed, "a").await.expect("registers");
}

#[tokio::test]
async fn dialling_waits_for_the_process() {
    let directory = directory();
    for is_stale in [false, true] {
        if is_stale {
            leave_stale_socket(&socket(&directory));
        }
        let dialing = tokio::spawn(connect(socket(&directory), soon()));
        tokio::task::yield_now().await;
        assert!(!dialing.is_finished());
        let server = run_at(&socket(&directory));
        let dialed = dialing.await.expect("runs").expect("dials");
        register(&dialed, "a").await.expect("registers");
        server.stop.send(()).expect("stops");
        server.ended.await.expect("ends").expect("serves");
    }
}

#[tokio::test]
async fn dialling_says_what_was_wrong_until_the_deadline() {
    let directory = directory();
    let deadline = || Instant::now() + Duration::from_millis(50);
    let missing = connect(socket(&directory), deadline())
        .await
        .expect_err("missing");
    assert!(matches!(missing, DialError::Missing { .. }), "{missing}");
    leave_stale_socket(&socket(&directory));
    let refused = connect(socket(&directory), deadline())
        .await
        .expect_err("refused");
    assert!(matches!(refused, DialError::Refused { .. }), "{refused}");
}

#[tokio::test]
async fn the_end_of_the_peer_is_reported_and_nothing_reconnects() {
    let directory = directory();
    let first = run_at(&socket(&directory));
    let dialed = connect(socket(&directory), soon()).await.expect("dials");
    register(&dialed, "a").await.expect("registers");
    assert!(!dialed.closed().is_closed());

    first.stop.send(()).expect("stops");
    first.ended.await.expect("ends").expect("serves");
    dialed.closed().wait().await;
    let mut second = run_at(&socket(&directory));

    for _ in 0..3 {
        let status = register(&dialed, "b").await.expect_err("gone");
        assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    }
    // Later waits end at once too.
    dialed.closed().wait().await;
    assert!(second.calls.try_recv().is_err(), "the new process was called");
}

#[tokio::test]
async fn a_connection_ends_with_its_last_handle() {
    let directory = directory();
    let _server = run_at(&socket(&directory));
    let dialed = connect(socket(&directory), soon()).await.expect("dials");
    let gone = dialed.closed();
    drop(dialed);
    gone.wait().await;
}

#[tokio::test]
async fn a_peer_that_floods_and_does_not_read_does_not_keep_its_connection() {
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    const PING: [u8; 17] = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    let directory = directory();
    let listener = std::os::unix::net::UnixListener::bind(socket(&directory)).expect("listens");
    let flood = std::thread::spawn(move || {
        let (mut peer, _) = listener.accept().expect("accepts");
        peer.write_all(&SETTINGS).expect("is read");
        // Until the peer is gone.
        while peer.write_all(&PING).is_ok() {}
    });
    let dialed = connect(socket(&directory), soon()).await.expect("dials");
    let gone = dialed.closed();
    let call = tokio::time::timeout(Duration::from_millis(200), register(&dialed, "unheard"));
    assert!(call.await.is_err(), "no peer answers");

    drop(dialed);

    tokio::time::timeout_at(soon(), gone.wait()).await.expect("ends");
    flood.join().expect("sees the end");
}

#[tokio::test]
async fn a_dialled_peer_that_floods_is_throttled() {
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    const PING: [u8; 17] = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    let directory = directory();
    let listener = StdListener::bind(socket(&directory)).expect("listens");
    let flood = std::thread::spawn(move || {
        let (mut peer, _) = listener.accept().expect("accepts");
        let mut answers = peer.try_clone().expect("a clone");
        std::thread::spawn(move || while answers.read(&mut [0; 4096]).is_ok_and(|read| read > 0) {});
        peer.write_all(&SETTINGS).expect("is read");
        peer.set_nonblocking(true).expect("does not block");
        let pings = PING.repeat(1_000);
        let (mut sent, end) = (0, Instant::now() + Duration::from_secs(3));
        while Instant::now() < end {
            sent += peer.write(&pings).unwrap_or_default();
            std::thread::yield_now();
        }
        sent
    });
    let limits = ReadLimits::default();
    let _dialed = connect_limited(socket(&directory), soon(), &limits)
        .await
        .expect("dials");
    let sent = tokio::task::spawn_blocking(|| flood.join())
        .await
        .expect("runs")
        .expect("ends");
    assert!(sent < 6 << 20, "the flood is not throttled: {sent} bytes");
}

#[tokio::test]
async fn hanging_up_ends_calls_under_way() {
    let directory = directory();
    let mut server = run_at(&socket(&directory));
    let dialed = connect(socket(&directory), soon()).await.expect("dials");
    let call = tokio::spawn({
        let dialed = dialed.clone();
        async move { register(&dialed, "wait").await }
    });
    server.calls.recv().await.expect("called");

    dialed.close();

    dialed.closed().wait().await;
    let status = call.await.expect("runs").expect_err("ended");
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    let status = register(&dialed, "a").await.expect_err("ended");
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
}

/// Sends one message on each stream, and then nothing.
struct Quiet;

#[tonic::async_trait]
impl DevicePlugin for Quiet {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        std::future::pending().await
    }

    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let first = tokio_stream::once(Ok(ListAndWatchResponse::default()));
        Ok(Response::new(Box::pin(first.chain(tokio_stream::pending()))))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unknown("no preference"))
    }

    async fn allocate(&self, _: Request<AllocateRequest>) -> Result<Response<AllocateResponse>, Status> {
        Err(Status::cancelled("not now"))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse::default()))
    }
}

async fn quiet_plugin(directory: &TempDir) -> (DevicePluginClient<Channel>, PeerConnection) {
    let listener = listen(socket(directory), DEFAULT_MODE).expect("listens");
    let routes = Routes::new(DevicePluginServer::new(Quiet));
    tokio::spawn(serve(
        listener,
        routes,
        ServerLimits::default(),
        ignore_refusals(),
        std::future::pending(),
    ));
    let dialed = connect(socket(directory), soon()).await.expect("dials");
    (DevicePluginClient::new(dialed.channel.clone()), dialed)
}

#[tokio::test]
async fn a_stream_that_loses_its_connection_says_so() {
    let directory = directory();
    let (mut client, dialed) = quiet_plugin(&directory).await;
    let mut lists = client
        .list_and_watch(Empty {})
        .await
        .expect("a stream")
        .into_inner();
    assert!(lists.message().await.expect("a message").is_some());

    dialed.close();

    let status = lists.message().await.expect_err("ended");
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
}

#[tokio::test]
async fn a_call_that_runs_out_of_time_says_so() {
    let directory = directory();
    let (mut client, dialed) = quiet_plugin(&directory).await;
    let mut request = Request::new(Empty {});
    request.set_timeout(Duration::from_millis(50));
    let status = client.get_device_plugin_options(request).await.expect_err("late");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert!(!dialed.closed().is_closed());
}

#[tokio::test]
async fn answers_of_the_peer_are_not_changed() {
    let directory = directory();
    let (mut client, _dialed) = quiet_plugin(&directory).await;
    let status = client
        .allocate(AllocateRequest::default())
        .await
        .expect_err("refused");
    assert_eq!((status.code(), status.message()), (Code::Cancelled, "not now"));
    let status = client
        .get_preferred_allocation(PreferredAllocationRequest::default())
        .await
        .expect_err("refused");
    assert_eq!(
        (status.code(), status.message()),
        (Code::Unknown, "no preference")
    );
}

#[tokio::test]
async fn peers_that_are_not_admitted_get_no_answer() {
    let directory = directory();
    let (sender, mut asked) = mpsc::unbounded_channel();
    let listener = listen(socket(&directory), DEFAULT_MODE).expect("listens");
    let listener = listener.admit(move |peer| {
        let _ = sender.send(*peer);
        false
    });
    let _server = run(listener, ServerLimits::default());
    let mut stream = UnixStream::connect(socket(&directory)).await.expect("connects");
    let mut heard = Vec::new();
    let _ = stream.read_to_end(&mut heard).await;
    assert!(heard.is_empty());
    assert_eq!(asked.recv().await.map(|peer| peer.uid), Some(me().0));
}

/// Connects and makes a call that waits.
async fn busy(directory: &TempDir, server: &mut Running) -> (PeerConnection, JoinHandle<Result<(), Status>>) {
    let dialed = connect(socket(directory), soon()).await.expect("dials");
    let caller = dialed.clone();
    let call = tokio::spawn(async move { register(&caller, "wait").await });
    server.calls.recv().await.expect("the call arrives");
    (dialed, call)
}

/// Waits until the server accepts a connection again, and makes a call on it.
async fn until_accepted(directory: &TempDir) -> PeerConnection {
    loop {
        let next = connect(socket(directory), soon()).await;
        if let Ok(next) = next
            && register(&next, "a").await.is_ok()
        {
            return next;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn connections_over_the_limit_of_a_user_are_closed_and_reported() {
    let directory = directory();
    let limits = ServerLimits {
        connections_per_uid: 2,
        ..ServerLimits::default()
    };
    let listener = listen(socket(&directory), DEFAULT_MODE).expect("listens");
    let (on_refusal, mut refusals) = reported();
    let mut server = run_reporting(listener, limits, on_refusal);
    let (first, _) = busy(&directory, &mut server).await;
    let (_second, second) = busy(&directory, &mut server).await;

    for _ in 0..20 {
        let mut refused = UnixStream::connect(socket(&directory)).await.expect("connects");
        let mut received = Vec::new();
        // A reset is an end, too.
        let _ = refused.read_to_end(&mut received).await;
        assert!(received.is_empty(), "{received:?}");
        assert_eq!(refusals.recv().await, Some(Refusal::TooManyConnections));
    }

    first.close();
    first.closed().wait().await;
    until_accepted(&directory).await;
    server.go_on.notify_waiters();
    second.await.expect("ends").expect("the second connection stays");
}

#[tokio::test]
async fn a_user_that_opens_connections_too_fast_is_refused_and_others_stay() {
    let directory = directory();
    let listener = listen(socket(&directory), DEFAULT_MODE).expect("listens");
    let (on_refusal, mut refusals) = reported();
    let _server = run_reporting(listener, ServerLimits::default(), on_refusal);
    let earlier = connect(socket(&directory), soon()).await.expect("dials");
    register(&earlier, "a").await.expect("registers");

    // Until the server has closed them, the connections also count against the limit of the user.
    while refusals.try_recv() != Ok(Refusal::TooManyAttempts) {
        drop(StdStream::connect(socket(&directory)));
        tokio::task::yield_now().await;
    }
    register(&earlier, "a").await.expect("the connection stays");
    until_accepted(&directory).await;
}

#[tokio::test]
async fn a_connection_without_a_call_in_flight_is_closed_after_a_while() {
    let directory = directory();
    for expects_call in [false, true] {
        let limits = ServerLimits {
            preface: Duration::from_millis(300),
            idle: Some(Duration::from_millis(300)),
            expects_call,
            ..ServerLimits::default()
        };
        let mut server = run(listen(socket(&directory), DEFAULT_MODE).expect("listens"), limits);
        let (busy, call) = busy(&directory, &mut server).await;
        let idle = connect(socket(&directory), soon()).await.expect("dials");
        let made = Instant::now();
        register(&idle, "a").await.expect("registers");
        idle.closed().wait().await;
        assert!(
            made.elapsed() >= Duration::from_millis(300),
            "{:?}",
            made.elapsed()
        );
        assert!(!busy.closed().is_closed());
        server.go_on.notify_waiters();
        call.await.expect("ends").expect("a call in flight continues");
        busy.closed().wait().await;
        server.stop.send(()).expect("stops");
        server.ended.await.expect("ends").expect("serves");
    }
}

#[tokio::test]
async fn a_flood_is_throttled_also_while_a_call_is_in_flight() {
    const PING: [u8; 17] = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    let directory = directory();
    let mut server = run_at(&socket(&directory));
    let mut flood = UnixStream::connect(socket(&directory)).await.expect("connects");
    flood.write_all(&opening()).await.expect("writes");
    flood.write_all(&head_of_a_call(0x4)).await.expect("writes");
    // "wait" as the endpoint, in a message with its length before it.
    let message = [&[0, 0, 0, 0, 6, 0x12, 4][..], b"wait"].concat();
    let data = [&[0, 0, message.len() as u8, 0, 1, 0, 0, 0, 1][..], &message].concat();
    flood.write_all(&data).await.expect("writes");
    server.calls.recv().await.expect("the call arrives");

    let (mut answers, mut flood) = flood.into_split();
    let drained =
        tokio::spawn(async move { while answers.read(&mut [0; 4096]).await.is_ok_and(|read| read > 0) {} });
    let pings = PING.repeat(1_000);
    let mut sent = 0;
    let flooding = async {
        loop {
            sent += flood.write(&pings).await.expect("writes");
        }
    };
    let ended: Result<(), _> = tokio::time::timeout(Duration::from_secs(3), flooding).await;
    assert!(ended.is_err());
    assert!(sent < 6 << 20, "the flood is not throttled: {sent} bytes");
    drained.abort();
}

/// Returns the first bytes of a client: the preface and empty settings.
fn opening() -> Vec<u8> {
    [
        &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..],
        &[0, 0, 0, 4, 0, 0, 0, 0, 0],
    ]
    .concat()
}

/// Returns the HEADERS frame of a `Register` call.
fn head_of_a_call(flags: u8) -> Vec<u8> {
    let path = "/v1beta1.Registration/Register";
    let kind = "application/grpc";
    // :method POST, :scheme http, then literals: :path (4) and content-type (31).
    let mut block = vec![0x83, 0x86, 0x04, path.len() as u8];
    block.extend(path.as_bytes());
    block.extend([0x0f, 0x10, kind.len() as u8]);
    block.extend(kind.as_bytes());
    let mut frame = vec![0, 0, block.len() as u8, 0x1, flags, 0, 0, 0, 1];
    frame.extend(block);
    frame
}

#[tokio::test]
async fn where_a_call_is_expected_a_peer_without_a_whole_one_is_dropped() {
    let directory = directory();
    let limits = ServerLimits {
        preface: Duration::from_millis(200),
        expects_call: true,
        ..ServerLimits::default()
    };
    let _server = run(listen(socket(&directory), DEFAULT_MODE).expect("listens"), limits);
    let patient = connect(socket(&directory), soon()).await.expect("dials");
    register(&patient, "a").await.expect("registers");
    let head = head_of_a_call(0x4);
    let ping = [0, 0, 8, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for (name, said) in [
        ("nothing", vec![]),
        ("an opening", opening()),
        ("half a head", [opening(), head[..20].to_vec()].concat()),
        ("a head without its end", [opening(), head_of_a_call(0)].concat()),
        ("a head without a message", [opening(), head.clone()].concat()),
        (
            "half a message",
            [opening(), head, vec![0, 0, 5, 0, 0, 0, 0, 0, 1, 0, 0]].concat(),
        ),
    ] {
        let mut stream = UnixStream::connect(socket(&directory)).await.expect("connects");
        stream.write_all(&said).await.expect("writes");
        let ended = tokio::time::timeout(LONG, stream.read_to_end(&mut Vec::new())).await;
        // A reset is an end too.
        assert!(ended.is_ok(), "{name}: it stays");
    }
    // This peer sends frames and does not read.
    let mut stream = UnixStream::connect(socket(&directory)).await.expect("connects");
    stream.write_all(&opening()).await.expect("writes");
    let ended = tokio::time::timeout(LONG, async { while stream.write_all(&ping).await.is_ok() {} });
    ended.await.expect("dropped in time");
    register(&patient, "a")
        .await
        .expect("a peer that made a call may be idle");
}

#[tokio::test]
async fn a_peer_that_says_nothing_is_dropped() {
    let directory = directory();
    let limits = ServerLimits {
        preface: Duration::from_millis(50),
        ..ServerLimits::default()
    };
    let _server = run(listen(socket(&directory), DEFAULT_MODE).expect("listens"), limits);
    let patient = connect(socket(&directory), soon()).await.expect("dials");
    register(&patient, "a").await.expect("registers");
    for said in [&b""[..], b"PRI * HTTP/2.0\r\n\r\nSM"] {
        let mut stream = UnixStream::connect(socket(&directory)).await.expect("connects");
        stream.write_all(said).await.expect("writes");
        let ended = tokio::time::timeout(LONG, stream.read_to_end(&mut Vec::new())).await;
        ended.expect("dropped in time").expect("reads");
    }
    register(&patient, "a")
        .await
        .expect("a peer that said something may be idle");
}

#[tokio::test]
async fn a_call_under_way_may_finish_after_the_shutdown() {
    let directory = directory();
    let limits = ServerLimits {
        drain: LONG,
        ..ServerLimits::default()
    };
    let mut server = run(listen(socket(&directory), DEFAULT_MODE).expect("listens"), limits);
    let dialed = connect(socket(&directory), soon()).await.expect("dials");
    let call = tokio::spawn({
        let dialed = dialed.clone();
        async move { register(&dialed, "wait").await }
    });
    server.calls.recv().await.expect("called");

    server.stop.send(()).expect("stops");
    // Once the socket is gone, the server no longer accepts.
    while socket(&directory).exists() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    server.go_on.notify_one();

    call.await.expect("runs").expect("answered");
    server.ended.await.expect("ends").expect("serves");
}

#[tokio::test]
async fn a_shutdown_ends_whatever_the_peers_do() {
    let directory = directory();
    let limits = ServerLimits {
        drain: Duration::from_millis(50),
        ..ServerLimits::default()
    };
    let mut server = run(listen(socket(&directory), DEFAULT_MODE).expect("listens"), limits);
    let dialed = connect(socket(&directory), soon()).await.expect("dials");
    let call = tokio::spawn({
        let dialed = dialed.clone();
        async move { register(&dialed, "wait").await }
    });
    server.calls.recv().await.expect("called");
    let _silent = UnixStream::connect(socket(&directory)).await.expect("connects");

    server.stop.send(()).expect("stops");

    tokio::time::timeout(LONG, server.ended)
        .await
        .expect("in time")
        .expect("ends")
        .expect("serves");
    let status = call.await.expect("runs").expect_err("cut");
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(names(&directory).is_empty());
}

#[tokio::test]
async fn a_server_that_is_dropped_drops_its_connections() {
    let directory = directory();
    let server = run_at(&socket(&directory));
    let dialed = connect(socket(&directory), soon()).await.expect("dials");
    register(&dialed, "a").await.expect("registers");
    server.ended.abort();
    dialed.closed().wait().await;
    assert!(names(&directory).is_empty());
}

#[tokio::test]
async fn a_large_message_passes() {
    let directory = directory();
    let mut server = run_at(&socket(&directory));
    let dialed = connect(socket(&directory), soon()).await.expect("dials");
    let large = "/".repeat(20 * 1024 * 1024);
    register(&dialed, &large).await.expect("registers");
    let (_, endpoint) = server.calls.recv().await.expect("called");
    assert!(endpoint == large);
}
