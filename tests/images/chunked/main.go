// Makes layers with a table of contents from a tar archive on standard input, with the libraries of the tools that make them:
// `chunked zstd:chunked` as buildah, podman and skopeo do, `chunked estargz` as nerdctl and buildkit do, with options: `chunk-size=BYTES`
// and `min-chunk-size=BYTES`. `chunked estargz lossless` keeps the archive as it is. The blob is written to standard output, the annotations
// of its descriptor as JSON to standard error.
package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
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

// The options of `chunked estargz`.
func options(arguments []string) (options []estargz.Option) {
	for _, argument := range arguments {
		name, value, _ := strings.Cut(argument, "=")
		bytes, err := strconv.Atoi(value)
		check(err)
		switch name {
		case "chunk-size":
			options = append(options, estargz.WithChunkSize(bytes))
		case "min-chunk-size":
			options = append(options, estargz.WithMinChunkSize(bytes))
		default:
			check(fmt.Errorf("no option %q", name))
		}
	}
	return options
}

func main() {
	annotations := map[string]string{}
	switch kind := os.Args[1]; {
	case kind == "zstd:chunked":
		writer, err := compressor.ZstdCompressor(os.Stdout, annotations, nil)
		check(err)
		_, err = io.Copy(writer, os.Stdin)
		check(err)
		check(writer.Close())
	case kind == "estargz" && len(os.Args) == 3 && os.Args[2] == "lossless":
		writer := estargz.NewWriterLevel(os.Stdout, gzip.BestCompression)
		check(writer.AppendTarLossLess(os.Stdin))
		table, err := writer.Close()
		check(err)
		annotations[estargz.TOCJSONDigestAnnotation] = table.String()
		annotations["diff-id"] = writer.DiffID()
	case kind == "estargz":
		archive, err := io.ReadAll(os.Stdin)
		check(err)
		blob, err := estargz.Build(io.NewSectionReader(bytes.NewReader(archive), 0, int64(len(archive))), options(os.Args[2:])...)
		check(err)
		_, err = io.Copy(os.Stdout, blob)
		check(err)
		check(blob.Close())
		annotations[estargz.TOCJSONDigestAnnotation] = blob.TOCDigest().String()
		annotations["diff-id"] = blob.DiffID().String()
	default:
		check(fmt.Errorf("chunked zstd:chunked | estargz [OPTION...], not %q", kind))
	}
	check(json.NewEncoder(os.Stderr).Encode(annotations))
}
