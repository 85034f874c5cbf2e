// Command bindings is a DRA driver that uses only the gRPC bindings of
// k8s.io/kubelet. It registers, prepares for each claim the device of the
// claim's name, and reports the health of its devices.
//
// Commands: "health DEVICE HEALTHY|UNHEALTHY|UNKNOWN".
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	healthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drav1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"devlet.test/interop/events"
)

var (
	root     = flag.String("root", "/var/lib/kubelet", "the directory of the node")
	name     = flag.String("driver", "", "the driver's name")
	services = flag.String("services", drav1.DRAPluginService, "services to serve, separated by commas")
)

type driver struct {
	drav1.UnimplementedDRAPluginServer
	healthv1.UnimplementedDRAResourceHealthServer
	registration.UnimplementedRegistrationServer

	endpoint string
	services []string

	mu       sync.Mutex
	prepared map[string]bool
	health   map[string]healthv1.HealthStatus
	watchers map[chan struct{}]bool
}

func main() {
	flag.Parse()
	directory := filepath.Join(*root, "plugins", *name)
	d := &driver{
		endpoint: filepath.Join(directory, "dra.sock"),
		services: strings.Split(*services, ","),
		prepared: map[string]bool{},
		health:   map[string]healthv1.HealthStatus{},
		watchers: map[chan struct{}]bool{},
	}
	must(os.MkdirAll(directory, 0o750))
	defer serve(d.endpoint, func(s *grpc.Server) {
		for _, service := range d.services {
			switch service {
			case drav1.DRAPluginService:
				drav1.RegisterDRAPluginServer(s, d)
			case drav1beta1.DRAPluginService:
				drav1beta1.RegisterDRAPluginServer(s, drav1beta1.V1ServerWrapper{DRAPluginServer: d})
			case healthv1.DRAResourceHealthService:
				healthv1.RegisterDRAResourceHealthServer(s, d)
			case healthv1alpha1.DRAResourceHealthService:
				healthv1alpha1.RegisterDRAResourceHealthServer(s, healthv1.V1ServerWrapper{Server: d})
			}
		}
	})()
	defer serve(filepath.Join(*root, "plugins_registry", *name+"-reg.sock"), func(s *grpc.Server) {
		registration.RegisterRegistrationServer(s, d)
	})()
	events.Commands(d.execute)
}

// serve returns a function that stops the server and removes the socket.
func serve(path string, register func(*grpc.Server)) func() {
	os.Remove(path)
	listener, err := net.Listen("unix", path)
	must(err)
	server := grpc.NewServer(grpc.UnaryInterceptor(reportCall))
	register(server)
	go server.Serve(listener)
	return server.Stop
}

// reportCall reports a call by its name on the wire, before it is answered.
func reportCall(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	e := events.Event{Call: info.FullMethod}
	switch r := request.(type) {
	case interface{ GetClaims() []*drav1.Claim }:
		for _, claim := range r.GetClaims() {
			e.Claims = append(e.Claims, claim.Uid)
		}
	case interface{ GetClaims() []*drav1beta1.Claim }:
		for _, claim := range r.GetClaims() {
			e.Claims = append(e.Claims, claim.Uid)
		}
	case *registration.RegistrationStatus:
		e.Text = fmt.Sprint(r.PluginRegistered, " ", r.Error)
	}
	slices.Sort(e.Claims)
	events.Emit(e)
	return handler(ctx, request)
}

func (d *driver) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: registration.DRAPlugin, Name: *name, Endpoint: d.endpoint, SupportedVersions: d.services,
	}, nil
}

func (d *driver) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if !s.PluginRegistered {
		return nil, status.Error(codes.Internal, s.Error)
	}
	return &registration.RegistrationStatusResponse{}, nil
}

func (d *driver) NodePrepareResources(_ context.Context, r *drav1.NodePrepareResourcesRequest) (*drav1.NodePrepareResourcesResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	answer := &drav1.NodePrepareResourcesResponse{Claims: map[string]*drav1.NodePrepareResourceResponse{}}
	for _, claim := range r.Claims {
		d.prepared[claim.Uid] = true
		answer.Claims[claim.Uid] = &drav1.NodePrepareResourceResponse{Devices: []*drav1.Device{{
			PoolName: "pool", DeviceName: claim.Name, CdiDeviceIds: []string{"interop.devlet.dev/widget=" + claim.Name},
		}}}
	}
	return answer, nil
}

func (d *driver) NodeUnprepareResources(_ context.Context, r *drav1.NodeUnprepareResourcesRequest) (*drav1.NodeUnprepareResourcesResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	answer := &drav1.NodeUnprepareResourcesResponse{Claims: map[string]*drav1.NodeUnprepareResourceResponse{}}
	for _, claim := range r.Claims {
		delete(d.prepared, claim.Uid)
		answer.Claims[claim.Uid] = &drav1.NodeUnprepareResourceResponse{}
	}
	return answer, nil
}

func (d *driver) NodeWatchResources(_ *healthv1.NodeWatchResourcesRequest, stream healthv1.DRAResourceHealth_NodeWatchResourcesServer) error {
	events.Emit(events.Event{Call: "NodeWatchResources"})
	changed := make(chan struct{}, 1)
	d.mu.Lock()
	d.watchers[changed] = true
	d.mu.Unlock()
	for {
		d.mu.Lock()
		report := &healthv1.NodeWatchResourcesResponse{}
		for device, health := range d.health {
			report.Devices = append(report.Devices, &healthv1.DeviceHealth{
				Device: &healthv1.DeviceIdentifier{PoolName: "pool", DeviceName: device},
				Health: health, HealthCheckTimeoutSeconds: 600, Message: "set by command",
			})
		}
		d.mu.Unlock()
		if err := stream.Send(report); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		}
	}
}

func (d *driver) execute(words []string) error {
	if len(words) != 3 || words[0] != "health" {
		return fmt.Errorf("unknown command %v", words)
	}
	health, known := healthv1.HealthStatus_value[words[2]]
	if !known {
		return fmt.Errorf("unknown health %s", words[2])
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.health[words[1]] = healthv1.HealthStatus(health)
	for changed := range d.watchers {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	return nil
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
