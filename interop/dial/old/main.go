// Dials a server of the Registration service as plugins of the first years of v1beta1 do.
package main

import (
	"context"
	"net"
	"time"

	"devlet.test/interop/dial/styles"
	"google.golang.org/grpc"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// dialer connects to its address, as a path.
var dialer = grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", path)
})

// timed is the dialer of the first plugins.
var timed = grpc.WithDialer(func(path string, timeout time.Duration) (net.Conn, error) {
	return net.DialTimeout("unix", path, timeout)
})

// fixed connects to the socket and ignores the target.
func fixed(socket string) grpc.DialOption {
	return grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	})
}

func dial(target string, options ...grpc.DialOption) (func() error, func() error, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := grpc.DialContext(ctx, target, append(options, grpc.WithInsecure())...)
	if err != nil {
		return nil, nil, err
	}
	client := api.NewRegistrationClient(conn)
	call := func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, err := client.Register(ctx, &api.RegisterRequest{
			Version: api.Version, Endpoint: "x.sock", ResourceName: "acme.com/gpu", Options: &api.DevicePluginOptions{},
		})
		return err
	}
	return call, conn.Close, nil
}

func main() {
	type result = func(string) (func() error, func() error, error)
	style := func(name string, dial result) styles.Style { return styles.Style{Name: name, Dial: dial} }
	styles.Run("grpc-go "+grpc.Version, []styles.Style{
		style("Dial(path), WithDialer, WithBlock, WithTimeout", func(s string) (func() error, func() error, error) {
			return dial(s, timed, grpc.WithBlock(), grpc.WithTimeout(10*time.Second))
		}),
		style("Dial(path), WithDialer", func(s string) (func() error, func() error, error) { return dial(s, timed) }),
		style("Dial(path), WithContextDialer", func(s string) (func() error, func() error, error) {
			return dial(s, dialer)
		}),
		style("Dial(path), WithContextDialer, WithAuthority(localhost)", func(s string) (func() error, func() error, error) {
			return dial(s, dialer, grpc.WithAuthority("localhost"))
		}),
		style("Dial(path), WithContextDialer, WithAuthority(path)", func(s string) (func() error, func() error, error) {
			return dial(s, dialer, grpc.WithAuthority(s))
		}),
		style("Dial(passthrough:///path), WithContextDialer", func(s string) (func() error, func() error, error) {
			return dial("passthrough:///"+s, dialer)
		}),
		style("Dial(passthrough:///unix:///path), fixed dialer", func(s string) (func() error, func() error, error) {
			return dial("passthrough:///unix://"+s, fixed(s))
		}),
		style("Dial(unix:path)", func(s string) (func() error, func() error, error) { return dial("unix:" + s) }),
		style("Dial(unix:path), WithBlock", func(s string) (func() error, func() error, error) {
			return dial("unix:"+s, grpc.WithBlock())
		}),
		style("Dial(unix:///path)", func(s string) (func() error, func() error, error) { return dial("unix://" + s) }),
		style("Dial(unix:///path), fixed dialer", func(s string) (func() error, func() error, error) {
			return dial("unix://"+s, fixed(s))
		}),
		style("Dial(passthrough:///localhost), fixed dialer", func(s string) (func() error, func() error, error) {
			return dial("passthrough:///localhost", fixed(s))
		}),
	})
}
