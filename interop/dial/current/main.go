// Dials a server of the Registration service as plugins built with a current grpc-go do.
package main

import (
	"context"
	"net"
	"time"

	"devlet.test/interop/dial/styles"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// dialer connects to its address, as a path.
var dialer = grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", path)
})

// fixed connects to the socket and ignores the target.
func fixed(socket string) grpc.DialOption {
	return grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	})
}

func use(conn *grpc.ClientConn, err error) (func() error, func() error, error) {
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

func dial(target string, options ...grpc.DialOption) (func() error, func() error, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	options = append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))
	return use(grpc.DialContext(ctx, target, options...))
}

func newClient(target string, options ...grpc.DialOption) (func() error, func() error, error) {
	options = append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))
	return use(grpc.NewClient(target, options...))
}

func main() {
	type result = func(string) (func() error, func() error, error)
	style := func(name string, dial result) styles.Style { return styles.Style{Name: name, Dial: dial} }
	styles.Run("grpc-go "+grpc.Version, []styles.Style{
		style("Dial(path), dialer", func(s string) (func() error, func() error, error) { return dial(s, dialer) }),
		style("Dial(path), dialer, WithBlock", func(s string) (func() error, func() error, error) {
			return dial(s, dialer, grpc.WithBlock())
		}),
		style("Dial(path), dialer, WithAuthority(localhost)", func(s string) (func() error, func() error, error) {
			return dial(s, dialer, grpc.WithAuthority("localhost"))
		}),
		style("Dial(path), dialer, WithAuthority(path)", func(s string) (func() error, func() error, error) {
			return dial(s, dialer, grpc.WithAuthority(s))
		}),
		style("Dial(path), dialer, WithDisableServiceConfig, WithUserAgent", func(s string) (func() error, func() error, error) {
			return dial(s, dialer, grpc.WithDisableServiceConfig(), grpc.WithUserAgent("plugin/1"))
		}),
		style("Dial(passthrough:///path), dialer", func(s string) (func() error, func() error, error) {
			return dial("passthrough:///"+s, dialer)
		}),
		style("Dial(passthrough:path), fixed dialer", func(s string) (func() error, func() error, error) {
			return dial("passthrough:"+s, fixed(s))
		}),
		style("Dial(passthrough:///unix:///path), fixed dialer", func(s string) (func() error, func() error, error) {
			return dial("passthrough:///unix://"+s, fixed(s))
		}),
		style("Dial(passthrough:///unix), fixed dialer", func(s string) (func() error, func() error, error) {
			return dial("passthrough:///unix", fixed(s))
		}),
		style("Dial(unix:path)", func(s string) (func() error, func() error, error) { return dial("unix:" + s) }),
		style("Dial(unix:path), WithBlock", func(s string) (func() error, func() error, error) {
			return dial("unix:"+s, grpc.WithBlock())
		}),
		style("Dial(unix:///path)", func(s string) (func() error, func() error, error) { return dial("unix://" + s) }),
		style("Dial(unix:path), WithAuthority(path)", func(s string) (func() error, func() error, error) {
			return dial("unix:"+s, grpc.WithAuthority(s))
		}),
		style("NewClient(unix:path)", func(s string) (func() error, func() error, error) { return newClient("unix:" + s) }),
		style("NewClient(unix:///path)", func(s string) (func() error, func() error, error) {
			return newClient("unix://" + s)
		}),
		style("NewClient(passthrough:///path), dialer", func(s string) (func() error, func() error, error) {
			return newClient("passthrough:///"+s, dialer)
		}),
		style("NewClient(passthrough:///a path with blanks and colons), fixed dialer", func(s string) (func() error, func() error, error) {
			return newClient("passthrough:////run/a b:c:d/kubelet.sock", fixed(s))
		}),
	})
}
