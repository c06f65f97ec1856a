// Makes layers with a table of contents from a tar archive on standard input, with the libraries of the tools that make them:
// `chunked zstd:chunked` as buildah, podman and skopeo do, `chunked estargz` as nerdctl and buildkit do. The blob is written to
// standard output, the annotations of its descriptor as JSON to standard error.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/containerd/stargz-snapshotter/estargz"
	"go.podman.io/storage/pkg/chunked/compressor"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	annotations := map[string]string{}
	switch kind := strings.Join(os.Args[1:], " "); kind {
	case "zstd:chunked":
		writer, err := compressor.ZstdCompressor(os.Stdout, annotations, nil)
		check(err)
		_, err = io.Copy(writer, os.Stdin)
		check(err)
		check(writer.Close())
	case "estargz":
		archive, err := io.ReadAll(os.Stdin)
		check(err)
		blob, err := estargz.Build(io.NewSectionReader(bytes.NewReader(archive), 0, int64(len(archive))))
		check(err)
		_, err = io.Copy(os.Stdout, blob)
		check(err)
		check(blob.Close())
		annotations[estargz.TOCJSONDigestAnnotation] = blob.TOCDigest().String()
		annotations["diff-id"] = blob.DiffID().String()
	default:
		check(fmt.Errorf("chunked zstd:chunked | estargz, not %q", kind))
	}
	check(json.NewEncoder(os.Stderr).Encode(annotations))
}
