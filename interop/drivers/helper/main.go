// Command helper is a DRA driver that uses
// k8s.io/dynamic-resource-allocation/kubeletplugin, the library for drivers. The
// library reads claims from an API server; here it uses a client with claims in
// memory.
//
// Commands: "claim FILE", which adds a claim to the client; "forget NAMESPACE
// NAME"; "health DEVICE Healthy|Unhealthy|Unknown".
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"sigs.k8s.io/yaml"

	"devlet.test/interop/events"
)

var (
	root    = flag.String("root", "/var/lib/kubelet", "the directory of the node")
	name    = flag.String("driver", "", "the driver's name")
	podUID  = flag.String("rolling-update", "", "the UID of the pod that it runs in, for rolling updates")
	nodeAPI = flag.Bool("v1", true, "serve the newest service")
)

const node = "node"

type driver struct {
	mu      sync.Mutex
	health  map[string]kubeletplugin.HealthStatus
	changed chan struct{}
}

func main() {
	flag.Parse()
	ctx := context.Background()
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node, UID: "node"}})
	d := &driver{health: map[string]kubeletplugin.HealthStatus{}, changed: make(chan struct{})}
	directory := filepath.Join(*root, "plugins", *name)
	must(os.MkdirAll(directory, 0o750))
	options := []kubeletplugin.Option{
		kubeletplugin.DriverName(*name),
		kubeletplugin.NodeName(node),
		kubeletplugin.KubeClient(client),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(*root, "plugins_registry")),
		kubeletplugin.PluginDataDirectoryPath(directory),
		kubeletplugin.NodeV1(*nodeAPI),
		kubeletplugin.GRPCInterceptor(func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			events.Emit(events.Event{Call: info.FullMethod})
			return handler(ctx, request)
		}),
	}
	if *podUID != "" {
		options = append(options, kubeletplugin.RollingUpdate(types.UID(*podUID)))
	}
	helper, err := kubeletplugin.Start(ctx, d, options...)
	must(err)
	go publish(ctx, helper)
	events.Commands(func(words []string) error {
		switch {
		case len(words) == 2 && words[0] == "claim":
			text, err := os.ReadFile(words[1])
			if err != nil {
				return err
			}
			claim := &resourceapi.ResourceClaim{}
			if err := yaml.UnmarshalStrict(text, claim); err != nil {
				return err
			}
			_, err = client.ResourceV1().ResourceClaims(claim.Namespace).Create(ctx, claim, metav1.CreateOptions{})
			return err
		case len(words) == 3 && words[0] == "forget":
			return client.ResourceV1().ResourceClaims(words[1]).Delete(ctx, words[2], metav1.DeleteOptions{})
		case len(words) == 3 && words[0] == "health":
			d.mu.Lock()
			defer d.mu.Unlock()
			d.health[words[1]] = kubeletplugin.HealthStatus(words[2])
			close(d.changed)
			d.changed = make(chan struct{})
			return nil
		case len(words) == 1 && words[0] == "status":
			s := helper.RegistrationStatus()
			if s == nil || !s.PluginRegistered {
				return fmt.Errorf("not registered: %v", s)
			}
			return nil
		}
		return fmt.Errorf("unknown command %v", words)
	})
	helper.Stop()
}

// publish publishes ResourceSlices, as every driver does first.
func publish(ctx context.Context, helper *kubeletplugin.Helper) {
	err := helper.PublishResources(ctx, resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{
		"pool": {Slices: []resourceslice.Slice{{Devices: []resourceapi.Device{{Name: "widget-0"}}}}},
	}})
	if err != nil {
		events.Emit(events.Event{Call: "error", Text: err.Error()})
	}
}

func (d *driver) PrepareResourceClaims(_ context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	e := events.Event{Call: "PrepareResourceClaims"}
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		e.Claims = append(e.Claims, string(claim.UID))
		var result kubeletplugin.PrepareResult
		for _, r := range claim.Status.Allocation.Devices.Results {
			if r.Driver != *name {
				continue
			}
			result.Devices = append(result.Devices, kubeletplugin.Device{
				Requests: []string{r.Request}, PoolName: r.Pool, DeviceName: r.Device, ShareID: r.ShareID,
				CDIDeviceIDs: []string{"interop.devlet.dev/widget=" + r.Device},
			})
		}
		results[claim.UID] = result
	}
	slices.Sort(e.Claims)
	events.Emit(e)
	return results, nil
}

func (d *driver) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	e := events.Event{Call: "UnprepareResourceClaims"}
	results := map[types.UID]error{}
	for _, claim := range claims {
		e.Claims = append(e.Claims, string(claim.UID))
		results[claim.UID] = nil
	}
	slices.Sort(e.Claims)
	events.Emit(e)
	return results, nil
}

func (d *driver) HandleError(_ context.Context, err error, msg string) {
	events.Emit(events.Event{Call: "error", Text: msg + ": " + err.Error()})
}

func (d *driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	events.Emit(events.Event{Call: "WatchHealthStatus"})
	for {
		d.mu.Lock()
		var report kubeletplugin.DeviceHealthReport
		for device, health := range d.health {
			report.Devices = append(report.Devices, kubeletplugin.DeviceHealth{
				PoolName: "pool", DeviceName: device, Health: health, Message: "set by command",
				LastUpdated: time.Now(), HealthCheckTimeout: 10 * time.Minute,
			})
		}
		changed := d.changed
		d.mu.Unlock()
		select {
		case reports <- report:
		case <-ctx.Done():
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
