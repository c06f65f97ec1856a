// Asks a CRI server for its version over every way in which programs dial a unix socket with grpc-go, one line per way:
// `NAME ok` or `NAME ERROR`. Messages are raw bytes, so that no generated code is needed.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
)

// raw passes messages as they are.
type raw struct{}

func (raw) Marshal(message interface{}) ([]byte, error) { return *message.(*[]byte), nil }
func (raw) Unmarshal(data []byte, message interface{}) error {
	*message.(*[]byte) = append([]byte(nil), data...)
	return nil
}
func (raw) Name() string   { return "raw" }
func (raw) String() string { return "raw" }

func dial(socket string) grpc.DialOption {
	return grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	})
}

func ask(target string, options ...grpc.DialOption) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	connection, err := grpc.Dial(target, append(options, grpc.WithInsecure())...)
	if err != nil {
		return err
	}
	defer connection.Close()
	// Again on the same connection: the second request refers to the header table of the first.
	for i := 0; i < 3; i++ {
		var request, answer []byte
		err := connection.Invoke(ctx, "/runtime.v1.RuntimeService/Version", &request, &answer, grpc.ForceCodec(raw{}))
		if err != nil {
			return err
		}
		if !strings.Contains(string(answer), "coracle") {
			return fmt.Errorf("answer %q", answer)
		}
	}
	return nil
}

func main() {
	socket := os.Args[1]
	ways := []struct {
		name    string
		target  string
		options []grpc.DialOption
	}{
		{"path", socket, []grpc.DialOption{dial(socket)}},
		{"unix-url", "unix://" + socket, []grpc.DialOption{dial(socket)}},
		{"unix-url-without-dialer", "unix://" + socket, nil},
		{"passthrough-path", "passthrough:///" + socket, []grpc.DialOption{dial(socket)}},
		{"passthrough-url", "passthrough:///unix://" + socket, []grpc.DialOption{dial(socket)}},
		{"passthrough-empty", "passthrough:///", []grpc.DialOption{dial(socket)}},
		{"colons", "passthrough:///a:b:" + socket, []grpc.DialOption{dial(socket)}},
		{"authority-localhost", "passthrough:///" + socket, []grpc.DialOption{dial(socket), grpc.WithAuthority("localhost")}},
		{"authority-path", "passthrough:///x", []grpc.DialOption{dial(socket), grpc.WithAuthority(socket)}},
	}
	for _, way := range ways {
		if err := ask(way.target, way.options...); err != nil {
			fmt.Println(way.name, err)
		} else {
			fmt.Println(way.name, "ok")
		}
	}
}
