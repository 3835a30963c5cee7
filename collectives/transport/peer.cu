// Kernels that move data between the GPUs of one host by peer memory (NVLink), without multicast.
//
// Every rank holds one symmetric allocation, its window; `p0..p7` are the addresses of all ranks' windows as this GPU
// sees them. Each word of a flag area has one writer. Counters only grow, so a kernel knows which round it is in from a
// word of its own window, and a captured CUDA graph can be replayed.
//
// Two families:
//  - exchange: `await_ready`, `signal`, `await_arrived`, `release`, `reduce_staged`, `reduce_wide`: the flags and the sums
//    around matrices that the GPU's copy engines move, so that no multiprocessor is taken from the computation;
//  - small: `*_small` and `*_two_shot` for messages of some KiB, where every 8 bytes travel with their flag (as in NCCL's
//    LL protocol), so that one trip over the link is all the latency there is.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

// RANKS, the size of the group, is given when this is compiled: loops over peers unroll, and addresses stay in registers.
#ifndef RANKS
#error "compile with -DRANKS=2 to -DRANKS=8"
#endif

struct Windows {
    char* base[8];
};

#define WINDOW_PARAMS char *p0, char *p1, char *p2, char *p3, char *p4, char *p5, char *p6, char *p7
#define WINDOWS {{p0, p1, p2, p3, p4, p5, p6, p7}}

// ---- layout of an exchange window's head: words of 4 bytes (collectives/transport/symmetric.py reserves HEAD_BYTES for it) ----
constexpr int ROUND = 0;      // [0]: rounds that this rank has finished; written by itself
constexpr int READY = 64;     // [rank]: rounds whose slots that rank has given free again; written by that rank
constexpr int ARRIVED = 128;  // [rank]: rounds in which that rank has filled its slot here; written by that rank

__device__ __forceinline__ u32 load_acquire(const u32* address) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(u32* address, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void wait_at_least(const u32* address, u32 value) {
    while (static_cast<int>(load_acquire(address) - value) < 0) {
    }
}

// Wait until every peer has given its slots of the last round free: before a copy engine writes there. One warp.
extern "C" __global__ void await_ready(const char* window, int rank) {
    const u32* own = reinterpret_cast<const u32*>(window);
    if (threadIdx.x < RANKS && threadIdx.x != rank) wait_at_least(own + READY + threadIdx.x, own[ROUND]);
}

// Tell the peer `ahead` places after this rank that its slot there is filled. One thread.
extern "C" __global__ void signal(WINDOW_PARAMS, int rank, int ahead) {
    const Windows windows = WINDOWS;
    const u32 round = reinterpret_cast<const u32*>(windows.base[rank])[ROUND] + 1;
    __threadfence_system();  // the copy engine has finished: the stream's order says so
    store_release(reinterpret_cast<u32*>(windows.base[(rank + ahead) % RANKS]) + ARRIVED + rank, round);
}

// Wait until the `count` ranks that come `behind` places and more before this one have filled their slots. One warp.
extern "C" __global__ void await_arrived(const char* window, int rank, int behind, int count) {
    const u32* own = reinterpret_cast<const u32*>(window);
    if (threadIdx.x < count) {
        const int peer = (rank - behind - static_cast<int>(threadIdx.x) + 2 * RANKS) % RANKS;
        wait_at_least(own + ARRIVED + peer, own[ROUND] + 1);
    }
}

// Finish a round: its slots have been read. One warp.
extern "C" __global__ void release(WINDOW_PARAMS, int rank) {
    const Windows windows = WINDOWS;
    u32* own = reinterpret_cast<u32*>(windows.base[rank]);
    const u32 round = own[ROUND] + 1;
    __syncwarp();
    if (threadIdx.x == 0) own[ROUND] = round;
    if (threadIdx.x < RANKS && threadIdx.x != rank) {
        store_release(reinterpret_cast<u32*>(windows.base[threadIdx.x]) + READY + rank, round);
    }
}

// ---- sums of floating-point numbers ----

template <typename T>
struct Pack;  // 8 bytes of T as floats and back

struct Bf16 {};
struct Fp16 {};

template <>
struct Pack<Bf16> {
    static constexpr int N = 4;
    static __device__ __forceinline__ void add(float* sum, uint2 v) {
        sum[0] += __uint_as_float(v.x << 16);
        sum[1] += __uint_as_float(v.x & 0xffff0000u);
        sum[2] += __uint_as_float(v.y << 16);
        sum[3] += __uint_as_float(v.y & 0xffff0000u);
    }
    static __device__ __forceinline__ u32 two(float low, float high) {
        u32 packed;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }
    static __device__ __forceinline__ uint2 pack(const float* sum) {
        return make_uint2(two(sum[0], sum[1]), two(sum[2], sum[3]));
    }
};

template <>
struct Pack<Fp16> {
    static constexpr int N = 4;
    static __device__ __forceinline__ float one(u32 bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(bits)));
        return value;
    }
    static __device__ __forceinline__ void add(float* sum, uint2 v) {
        sum[0] += one(v.x & 0xffffu);
        sum[1] += one(v.x >> 16);
        sum[2] += one(v.y & 0xffffu);
        sum[3] += one(v.y >> 16);
    }
    static __device__ __forceinline__ u32 two(float low, float high) {
        u32 packed;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }
    static __device__ __forceinline__ uint2 pack(const float* sum) {
        return make_uint2(two(sum[0], sum[1]), two(sum[2], sum[3]));
    }
};

template <>
struct Pack<float> {
    static constexpr int N = 2;
    static __device__ __forceinline__ void add(float* sum, uint2 v) {
        sum[0] += __uint_as_float(v.x);
        sum[1] += __uint_as_float(v.y);
    }
    static __device__ __forceinline__ uint2 pack(const float* sum) {
        return make_uint2(__float_as_uint(sum[0]), __float_as_uint(sum[1]));
    }
};

// Unit `u` of what every rank has given: this rank's own part, and the slots of the others.
template <typename Unit>
__device__ __forceinline__ void load_parts(Unit* part, const char* slots, int rank, u64 slot_bytes,
                                           const char* own_part, u64 u) {
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
        const char* from = r == rank ? own_part : slots + r * slot_bytes;
        part[r] = reinterpret_cast<const Unit*>(from)[u];
    }
}

// out = own + everything staged, in the order of the ranks, + `bias` (of `bias_bytes` a row; none where that is 0), in
// float32. It does not wait for the arrivals itself: a grid of spinning blocks would leave no room for the kernels that
// the peers wait for.
template <typename T>
__device__ __forceinline__ void reduce_staged(const char* slots, int rank, u64 slot_bytes, const char* own_part,
                                              char* out, const char* bias, int bias_bytes) {
    const u32 row_units = bias_bytes / 16;
    const u64 units = slot_bytes / 16;
    for (u64 u = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x; u < units;
         u += static_cast<u64>(gridDim.x) * blockDim.x) {
        uint4 part[RANKS];
        load_parts(part, slots, rank, slot_bytes, own_part, u);
        float low[Pack<T>::N] = {}, high[Pack<T>::N] = {};
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            Pack<T>::add(low, make_uint2(part[r].x, part[r].y));
            Pack<T>::add(high, make_uint2(part[r].z, part[r].w));
        }
        if (row_units) {
            const uint4 b = reinterpret_cast<const uint4*>(bias)[static_cast<u32>(u) % row_units];
            Pack<T>::add(low, make_uint2(b.x, b.y));
            Pack<T>::add(high, make_uint2(b.z, b.w));
        }
        const uint2 a = Pack<T>::pack(low), b = Pack<T>::pack(high);
        reinterpret_cast<uint4*>(out)[u] = make_uint4(a.x, a.y, b.x, b.y);
    }
}

// The same into float32 whatever travels, over the number of ranks if `mean`, and added to what is there if `adds`: four
// numbers a thread and turn. Rounded twice then, as by two passes: no multiply-add.
template <typename T>
__device__ __forceinline__ void reduce_wide(const char* slots, int rank, u64 slot_bytes, const char* own_part,
                                            float4* out, int mean, int adds) {
    constexpr int WORDS = 4 / Pack<T>::N;
    struct alignas(8 * WORDS) Four {
        uint2 word[WORDS];
    };
    const float scale = mean ? 1.0f / RANKS : 1.0f;
    const u64 fours = slot_bytes / sizeof(Four);
    for (u64 u = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x; u < fours;
         u += static_cast<u64>(gridDim.x) * blockDim.x) {
        Four part[RANKS];
        load_parts(part, slots, rank, slot_bytes, own_part, u);
        float sum[4] = {};
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
#pragma unroll
            for (int w = 0; w < WORDS; ++w) Pack<T>::add(sum + w * Pack<T>::N, part[r].word[w]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = __fmul_rn(sum[i], scale);
        if (adds) {
            const float4 before = out[u];
            sum[0] = __fadd_rn(before.x, sum[0]);
            sum[1] = __fadd_rn(before.y, sum[1]);
            sum[2] = __fadd_rn(before.z, sum[2]);
            sum[3] = __fadd_rn(before.w, sum[3]);
        }
        out[u] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
}

// ---- small messages ----
//
// A unit is 8 bytes of data. It travels as a line of 16 bytes {low, flag, high, flag}, stored at once; the flag is the
// round of the block, so nothing is ever cleared. Rounds alternate between two halves of the window: a rank enters
// round e + 1 once it has everything of round e from all peers, so all of them have left round e - 1, whose half is
// written next.

struct Line {
    u32 low, flag_low, high, flag_high;
};

__device__ __forceinline__ void send_line(char* line, uint2 data, u32 flag) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(line), "r"(data.x), "r"(flag), "r"(data.y),
                 "r"(flag)
                 : "memory");
}

__device__ __forceinline__ Line read_line(const char* line) {
    Line seen;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(seen.low), "=r"(seen.flag_low), "=r"(seen.high), "=r"(seen.flag_high)
                 : "l"(line)
                 : "memory");
    return seen;
}

// One block's view of the small window. Line of `unit` from `source`: half, then source, then unit.
struct Small {
    Windows windows;
    char* window;  // this rank's own
    int rank;
    u64 capacity;  // lines a source and half
    u32 round;

    __device__ __forceinline__ u64 line(int source, u64 unit) const {
        return (((round & 1) * static_cast<u64>(RANKS) + source) * capacity + unit) * 16;
    }

    // The same to every peer.
    __device__ __forceinline__ void send_all(uint2 data, u64 unit) const {
        const u64 offset = line(rank, unit);
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            if (r != rank) send_line(windows.base[r] + offset, data, round);
        }
    }

    // Part r of `in` ([RANKS, units]) to peer r.
    __device__ __forceinline__ void send_parts(const uint2* in, u64 units, u64 unit) const {
        const u64 offset = line(rank, unit);
        uint2 data[RANKS];
#pragma unroll
        for (int r = 0; r < RANKS; ++r) data[r] = in[r * units + unit];
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            if (r != rank) send_line(windows.base[r] + offset, data[r], round);
        }
    }

    // What every rank has sent as `unit`, this rank's own part being `own`. All lines are asked for at once.
    __device__ __forceinline__ void receive(uint2* data, uint2 own, u64 unit) const {
        Line seen[RANKS];
        bool complete;
        do {
            complete = true;
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                if (r != rank) seen[r] = read_line(window + line(r, unit));
            }
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                if (r != rank) complete &= seen[r].flag_low == round && seen[r].flag_high == round;
            }
        } while (!complete);
#pragma unroll
        for (int r = 0; r < RANKS; ++r) data[r] = r == rank ? own : make_uint2(seen[r].low, seen[r].high);
    }

    // Their sum in the order of the ranks, so that all of them get the same bits; in float32.
    template <typename T>
    __device__ __forceinline__ uint2 receive_sum(uint2 own, u64 unit) const {
        uint2 data[RANKS];
        receive(data, own, unit);
        float sum[Pack<T>::N] = {};
#pragma unroll
        for (int r = 0; r < RANKS; ++r) Pack<T>::add(sum, data[r]);
        return Pack<T>::pack(sum);
    }
};

// `in` is [units], `out` [RANKS, units].
__device__ __forceinline__ void all_gather_small(const Small& small, const uint2* in, uint2* out, u64 units, u64 u) {
    const uint2 own = in[u];
    small.send_all(own, u);
    uint2 data[RANKS];
    small.receive(data, own, u);
#pragma unroll
    for (int r = 0; r < RANKS; ++r) out[r * units + u] = data[r];
}

// `in` and `out` are [units].
template <typename T>
__device__ __forceinline__ void all_reduce_small(const Small& small, const uint2* in, uint2* out, u64 units, u64 u) {
    const uint2 own = in[u];
    small.send_all(own, u);
    out[u] = small.receive_sum<T>(own, u);
}

// `in` is [RANKS, units], `out` [units].
template <typename T>
__device__ __forceinline__ void reduce_scatter_small(const Small& small, const uint2* in, uint2* out, u64 units,
                                                     u64 u) {
    small.send_parts(in, units, u);
    out[u] = small.receive_sum<T>(in[small.rank * units + u], u);
}

// All-reduce as reduce-scatter and all-gather in one kernel: fewer bytes, one trip more. `in` and `out` are
// [RANKS, units]; the second leg uses the lines from `capacity / 2` on.
template <typename T>
__device__ __forceinline__ void all_reduce_two_shot(const Small& small, const uint2* in, uint2* out, u64 units, u64 u) {
    small.send_parts(in, units, u);
    const uint2 own = small.receive_sum<T>(in[small.rank * units + u], u);
    const u64 second = small.capacity / 2 + u;
    small.send_all(own, second);
    uint2 data[RANKS];
    small.receive(data, own, second);
#pragma unroll
    for (int r = 0; r < RANKS; ++r) out[r * units + u] = data[r];
}

// `rounds` holds one counter a block, in memory of this GPU. Blocks of the same index handle the same units on every
// rank, so their counters agree without a barrier.
#define SMALL_KERNEL(NAME, FUNCTION)                                                                                  \
    extern "C" __global__ void __launch_bounds__(512)                                                                 \
        NAME(WINDOW_PARAMS, char* own, int rank, const uint2* in, uint2* out, u64 units, u64 capacity, u32* rounds) { \
        const Small small = {WINDOWS, own, rank, capacity, rounds[blockIdx.x] + 1};                                   \
        const u64 u = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x;                                        \
        if (u < units) FUNCTION(small, in, out, units, u);                                                            \
        __syncthreads();                                                                                              \
        if (threadIdx.x == 0) rounds[blockIdx.x] = small.round;                                                       \
    }

SMALL_KERNEL(all_gather_small_bytes, all_gather_small)

#define KERNELS_OF(T, NAME)                                                                                           \
    extern "C" __global__ void __launch_bounds__(512)                                                                 \
        reduce_staged_##NAME(const char* slots, int rank, u64 slot_bytes, const char* own_part, char* out,            \
                             const char* bias, int bias_bytes) {                                                      \
        reduce_staged<T>(slots, rank, slot_bytes, own_part, out, bias, bias_bytes);                                   \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(512)                                                                 \
        reduce_wide_##NAME(const char* slots, int rank, u64 slot_bytes, const char* own_part, float4* out, int mean,  \
                           int adds) {                                                                                \
        reduce_wide<T>(slots, rank, slot_bytes, own_part, out, mean, adds);                                           \
    }                                                                                                                 \
    SMALL_KERNEL(all_reduce_small_##NAME, all_reduce_small<T>)                                                        \
    SMALL_KERNEL(reduce_scatter_small_##NAME, reduce_scatter_small<T>)                                                \
    SMALL_KERNEL(all_reduce_two_shot_##NAME, all_reduce_two_shot<T>)

KERNELS_OF(Bf16, bfloat16)
KERNELS_OF(Fp16, float16)
KERNELS_OF(float, float32)
