package cluster

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path"
	"strings"
	"time"
)

// Client calls the API server with the rights of one user, in JSON.
type Client struct {
	server string
	token  string
	http   http.Client
}

// Object is an object of the API.
type Object map[string]any

// Error is a failed call, as the API server reports it.
type Error struct {
	Call    string
	Code    int
	Reason  string
	Message string
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s: %d %s: %s", e.Call, e.Code, e.Reason, e.Message)
}

// IsCode reports whether an error is a call that failed with a status code.
func IsCode(err error, code int) bool {
	var failed *Error
	return errors.As(err, &failed) && failed.Code == code
}

// Content types of patches.
const (
	MergePatch     = "application/merge-patch+json"
	StrategicPatch = "application/strategic-merge-patch+json"
	ApplyPatch     = "application/apply-patch+yaml"
)

// newClient returns a client that trusts the authority's server.
func newClient(server string, authority *Authority, user User) (*Client, error) {
	roots := x509.NewCertPool()
	roots.AddCert(authority.cert)
	c := &Client{server: server}
	config := &tls.Config{RootCAs: roots}
	if user.Token != "" {
		token, err := os.ReadFile(user.Token)
		if err != nil {
			return nil, err
		}
		c.token = string(token)
	} else {
		pair, err := tls.LoadX509KeyPair(user.Cert, user.Key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	c.http.Transport = &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true, MaxIdleConnsPerHost: 32}
	return c, nil
}

// open starts a call. The answer's body is the caller's to close.
func (c *Client) open(ctx context.Context, method, path, kind string, body any) (*http.Response, error) {
	var reader io.Reader
	if body != nil {
		encoded, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		reader = bytes.NewReader(encoded)
	}
	request, err := http.NewRequestWithContext(ctx, method, c.server+path, reader)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", kind)
	request.Header.Set("Accept", "application/json")
	if c.token != "" {
		request.Header.Set("Authorization", "Bearer "+c.token)
	}
	response, err := c.http.Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode >= 300 {
		defer response.Body.Close()
		text, _ := io.ReadAll(response.Body)
		failed := &Error{Call: method + " " + path, Code: response.StatusCode}
		if json.Unmarshal(text, failed) != nil {
			failed.Message = string(text)
		}
		failed.Code = response.StatusCode
		return nil, failed
	}
	return response, nil
}

// Call makes a call with a deadline of 30 s and decodes its answer.
func (c *Client) Call(method, path, kind string, body any) (Object, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	response, err := c.open(ctx, method, path, kind, body)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	var answer Object
	return answer, json.NewDecoder(response.Body).Decode(&answer)
}

// Hold starts a call whose body does not end, so that the API server keeps a
// place for it until release is called. A call that the API server ends is
// made again.
func (c *Client) Hold(collection string) (release func()) {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		for ctx.Err() == nil {
			body, _ := io.Pipe()
			request, err := http.NewRequestWithContext(ctx, "POST", c.server+collection, body)
			if err != nil {
				return
			}
			request.Header.Set("Content-Type", "application/json")
			if response, err := c.http.Do(request); err == nil {
				response.Body.Close()
			}
			pause(ctx, 10*time.Millisecond)
		}
	}()
	return cancel
}

// Get returns an object or a list.
func (c *Client) Get(path string) (Object, error) { return c.Call("GET", path, "", nil) }

// Collection returns the path of a resource's collection, in the first version of the group that serves it.
func (c *Client) Collection(group, resource string) (string, error) {
	versions, err := c.Get("/apis/" + group)
	if err != nil {
		return "", err
	}
	for _, version := range versions.Objects("versions") {
		path := "/apis/" + version.Text("groupVersion")
		list, err := c.Get(path)
		if err != nil {
			return "", err
		}
		for _, served := range list.Objects("resources") {
			if served.Text("name") == resource {
				return path + "/" + resource, nil
			}
		}
	}
	return "", fmt.Errorf("the API server does not serve %s of %s", resource, group)
}

// Create creates an object in a collection.
func (c *Client) Create(collection string, object Object) (Object, error) {
	return c.Call("POST", collection, "application/json", object)
}

// Patch changes an object by a merge patch.
func (c *Client) Patch(path string, patch Object) (Object, error) {
	return c.Call("PATCH", path, MergePatch, patch)
}

// Delete deletes an object. A grace period below zero is that of the object.
func (c *Client) Delete(path string, grace int) error {
	options := Object{}
	if grace >= 0 {
		options["gracePeriodSeconds"] = grace
	}
	_, err := c.Call("DELETE", path, "application/json", options)
	return err
}

// List returns the objects of a collection, and its resource version.
func (c *Client) List(collection string, query url.Values) ([]Object, string, error) {
	list, err := c.Get(collection + "?" + query.Encode())
	if err != nil {
		return nil, "", err
	}
	return list.Objects("items"), list.Text("metadata", "resourceVersion"), nil
}

// Watch calls a function for each event until the function returns false, the
// server ends the watch, or the context ends.
func (c *Client) Watch(
	ctx context.Context, collection string, query url.Values, each func(kind string, object Object) bool,
) error {
	query = cloned(query)
	query.Set("watch", "true")
	response, err := c.open(ctx, "GET", collection+"?"+query.Encode(), "", nil)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	for events := json.NewDecoder(response.Body); ; {
		var event struct {
			Type   string
			Object Object
		}
		if err := events.Decode(&event); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if !each(event.Type, event.Object) {
			return nil
		}
	}
}

// WatchOnce starts a watch and ends it at the first event, which exists if an
// object does.
func (c *Client) WatchOnce(collection string, query url.Values) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return c.Watch(ctx, collection, query, func(string, Object) bool { return false })
}

// AwaitList waits until a condition returns no error for the objects of a
// collection. It is evaluated at first, and after each event.
func (c *Client) AwaitList(collection string, query url.Values, timeout time.Duration, condition func([]Object) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	for {
		objects, version, err := c.List(collection, query)
		if err == nil {
			if err = condition(objects); err == nil {
				return nil
			}
		}
		watched := cloned(query)
		watched.Set("resourceVersion", version)
		failed := c.Watch(ctx, collection, watched, func(string, Object) bool { return false })
		if ctx.Err() != nil {
			return fmt.Errorf("after %v, %s: %w", timeout, collection, err)
		}
		if failed != nil {
			pause(ctx, 100*time.Millisecond)
		}
	}
}

// Await waits until a condition returns no error for an object, which is nil
// while it does not exist, and returns it.
func (c *Client) Await(object string, timeout time.Duration, condition func(Object) error) (Object, error) {
	var last Object
	collection, name := path.Split(object)
	err := c.AwaitList(strings.TrimSuffix(collection, "/"), named(name), timeout, func(objects []Object) error {
		last = nil
		if len(objects) > 0 {
			last = objects[0]
		}
		return condition(last)
	})
	if err != nil {
		err = fmt.Errorf("%s: %w", name, err)
	}
	return last, err
}

// AwaitGone waits until an object does not exist, or another one has its name.
func (c *Client) AwaitGone(object, uid string, timeout time.Duration) error {
	_, err := c.Await(object, timeout, func(o Object) error {
		if o.UID() == uid {
			return fmt.Errorf("it still exists: %v", o["metadata"])
		}
		return nil
	})
	return err
}

func named(name string) url.Values { return url.Values{"fieldSelector": {"metadata.name=" + name}} }

func cloned(query url.Values) url.Values {
	clone := url.Values{}
	for key, values := range query {
		clone[key] = values
	}
	return clone
}

func pause(ctx context.Context, duration time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(duration):
	}
}

// At returns the value at a path of keys, or nil.
func (o Object) At(keys ...string) any {
	var value any = map[string]any(o)
	for _, key := range keys {
		parent, ok := value.(map[string]any)
		if !ok {
			return nil
		}
		value = parent[key]
	}
	return value
}

// Text returns the string at a path of keys, or "".
func (o Object) Text(keys ...string) string {
	text, _ := o.At(keys...).(string)
	return text
}

// Object returns the object at a path of keys, or nil.
func (o Object) Object(keys ...string) Object {
	object, _ := o.At(keys...).(map[string]any)
	return object
}

// Objects returns the list of objects at a path of keys.
func (o Object) Objects(keys ...string) []Object {
	list, _ := o.At(keys...).([]any)
	var objects []Object
	for _, element := range list {
		if object, ok := element.(map[string]any); ok {
			objects = append(objects, object)
		}
	}
	return objects
}

// Name returns the name of the object.
func (o Object) Name() string { return o.Text("metadata", "name") }

// UID returns the UID of the object, or "" for nil.
func (o Object) UID() string { return o.Text("metadata", "uid") }
