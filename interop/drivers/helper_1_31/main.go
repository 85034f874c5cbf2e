// Command helper_1_31 is a DRA driver that uses the helper of Kubernetes 1.31 as
// drivers of that time did. It registers only the version "1.0.0", and serves
// the alpha service.
package main

import (
	"context"
	"flag"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1alpha4"

	"devlet.test/interop/events"
)

var (
	root = flag.String("root", "/var/lib/kubelet", "the directory of the node")
	name = flag.String("driver", "", "the driver's name")
)

type driver struct{}

func main() {
	flag.Parse()
	directory := filepath.Join(*root, "plugins", *name)
	must(os.MkdirAll(directory, 0o750))
	endpoint := filepath.Join(directory, "dra.sock")
	helper, err := kubeletplugin.Start(context.Background(), driver{},
		kubeletplugin.DriverName(*name),
		kubeletplugin.RegistrarSocketPath(filepath.Join(*root, "plugins_registry", *name+"-reg.sock")),
		kubeletplugin.PluginSocketPath(endpoint),
		kubeletplugin.KubeletPluginSocketPath(endpoint),
		kubeletplugin.GRPCInterceptor(func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			e := events.Event{Call: info.FullMethod}
			if named, ok := request.(interface{ GetClaims() []*drapb.Claim }); ok {
				for _, claim := range named.GetClaims() {
					e.Claims = append(e.Claims, claim.UID)
				}
			}
			events.Emit(e)
			return handler(ctx, request)
		}),
	)
	must(err)
	events.Commands(func([]string) error { return nil })
	helper.Stop()
}

func (driver) NodePrepareResources(_ context.Context, r *drapb.NodePrepareResourcesRequest) (*drapb.NodePrepareResourcesResponse, error) {
	answer := &drapb.NodePrepareResourcesResponse{Claims: map[string]*drapb.NodePrepareResourceResponse{}}
	for _, claim := range r.Claims {
		answer.Claims[claim.UID] = &drapb.NodePrepareResourceResponse{Devices: []*drapb.Device{{
			RequestNames: []string{"one"}, PoolName: "pool", DeviceName: claim.Name,
			CDIDeviceIDs: []string{"interop.devlet.dev/widget=" + claim.Name},
		}}}
	}
	return answer, nil
}

func (driver) NodeUnprepareResources(_ context.Context, r *drapb.NodeUnprepareResourcesRequest) (*drapb.NodeUnprepareResourcesResponse, error) {
	answer := &drapb.NodeUnprepareResourcesResponse{Claims: map[string]*drapb.NodeUnprepareResourceResponse{}}
	for _, claim := range r.Claims {
		answer.Claims[claim.UID] = &drapb.NodeUnprepareResourceResponse{}
	}
	return answer, nil
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
