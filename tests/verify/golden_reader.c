/* Golden vectors in another language: reads the rmsnorm files that `myllm verify --golden` writes,
 * computes the op and its gradients in float, and writes its results for `--against`.
 *
 *     cc -O2 -o golden_reader golden_reader.c -lm && ./golden_reader GOLDEN/rmsnorm-0.safetensors OUT
 *
 * A safetensors file: 8 bytes, the length n of the header; n bytes of JSON, name -> dtype, shape,
 * data_offsets; the numbers. The header is searched rather than parsed, which is enough here. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    long rows, width; /* all axes but the last, and the last */
    char shape[128];  /* as the header has it */
    void *data;
} Tensor;

static char *header, *numbers;

static void load(const char *path) {
    FILE *file = fopen(path, "rb");
    uint64_t n;
    if (!file || fread(&n, 8, 1, file) != 1) { fprintf(stderr, "cannot read %s\n", path); exit(1); }
    fseek(file, 0, SEEK_END);
    long size = ftell(file) - 8;
    header = malloc(size + 1);
    fseek(file, 8, SEEK_SET);
    if (fread(header, 1, size, file) != (size_t)size) exit(1);
    fclose(file);
    numbers = malloc(size - n); /* a copy, so that numbers are aligned */
    memcpy(numbers, header + n, size - n);
    header[n] = 0;
}

static Tensor find(const char *name) {
    char key[80];
    Tensor t = {1, 1, "", NULL};
    snprintf(key, sizeof key, "\"%s\":{", name);
    char *at = strstr(header, key);
    if (!at) { fprintf(stderr, "there is no tensor %s\n", name); exit(1); }
    char *shape = strstr(at, "\"shape\":[") + 9, *end = strchr(shape, ']');
    memcpy(t.shape, shape, end - shape);
    for (char *p = shape; p < end; p++) {
        t.rows *= t.width;
        t.width = strtol(p, &p, 10);
    }
    t.data = numbers + strtol(strstr(at, "\"data_offsets\":[") + 16, NULL, 10);
    return t;
}

/* How far a result is from what was expected, in float64, relative to it. */
static double distance(const float *got, const char *name) {
    Tensor t = find(name);
    double err = 0, size = 0, *e = t.data;
    for (long i = 0; i < t.rows * t.width; i++) {
        err += (got[i] - e[i]) * (got[i] - e[i]);
        size += e[i] * e[i];
    }
    return sqrt(err / (size > 0 ? size : 1));
}

int main(int argc, char **argv) {
    if (argc != 3) { fprintf(stderr, "usage: golden_reader FILE.safetensors RESULT.safetensors\n"); return 2; }
    load(argv[1]);
    Tensor x = find("input.x"), gain = find("input.gain"), dout = find("dout");
    long rows = x.rows, D = x.width;
    float *xs = x.data, *g = gain.data, *dy = dout.data;
    float eps = strtof(strstr(header, "eps\\\": ") + 7, NULL);
    float *out = malloc(4 * rows * D), *dx = malloc(4 * rows * D), *dgain = calloc(D, 4);
    for (long n = 0; n < rows; n++, xs += D, dy += D) {
        float squares = 0, along = 0;
        for (long i = 0; i < D; i++) squares += xs[i] * xs[i];
        float r = 1 / sqrtf(squares / D + eps);
        for (long i = 0; i < D; i++) along += dy[i] * g[i] * xs[i] * r / D;
        for (long i = 0; i < D; i++) {
            out[n * D + i] = xs[i] * r * g[i];
            dx[n * D + i] = r * (dy[i] * g[i] - xs[i] * r * along);
            dgain[i] += dy[i] * xs[i] * r;
        }
    }
    printf("out %.1e dx %.1e dgain %.1e\n", distance(out, "expected.out"),
           distance(dx, "expected.dx"), distance(dgain, "expected.dgain"));
    char text[1024];
    long a = 4 * rows * D, b = 2 * a, c = b + 4 * D;
    int n = snprintf(text, sizeof text, "{\"out\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[0,%ld]},"
        "\"dx\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%ld,%ld]},"
        "\"dgain\":{\"dtype\":\"F32\",\"shape\":[%ld],\"data_offsets\":[%ld,%ld]}}",
        x.shape, a, x.shape, a, b, D, b, c);
    uint64_t length = n;
    FILE *file = fopen(argv[2], "wb");
    if (!file) { fprintf(stderr, "cannot write %s\n", argv[2]); return 1; }
    fwrite(&length, 8, 1, file);
    fwrite(text, 1, n, file);
    fwrite(out, 4, rows * D, file);
    fwrite(dx, 4, rows * D, file);
    fwrite(dgain, 4, D, file);
    return fclose(file) ? 1 : 0;
}
