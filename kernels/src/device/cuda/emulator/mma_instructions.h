// The functions of mma.cuh on the CPU; mma.cuh includes this file.
#pragma once

using SharedAddress = unsigned char*;

inline SharedAddress shared_address(const void* pointer) {
    return static_cast<unsigned char*>(const_cast<void*>(pointer));
}

inline void ldmatrix_x4(uint32_t (&r)[4], SharedAddress row) {
    auto rows = emulated::machine().exchange(ALL_LANES, row);
    unsigned lane = emulated::machine().current->lane;
    for (unsigned i = 0; i < 4; ++i) std::memcpy(&r[i], rows[8 * i + lane / 4] + lane % 4 * 4, 4);
}

inline void ldmatrix_x4_trans(uint32_t (&r)[4], SharedAddress row) {
    auto rows = emulated::machine().exchange(ALL_LANES, row);
    unsigned lane = emulated::machine().current->lane;
    for (unsigned i = 0; i < 4; ++i) {
        uint16_t first, second;
        std::memcpy(&first, rows[8 * i + lane % 4 * 2] + lane / 4 * 2, 2);
        std::memcpy(&second, rows[8 * i + lane % 4 * 2 + 1] + lane / 4 * 2, 2);
        r[i] = uint32_t(second) << 16 | first;
    }
}

inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    // Each lane's fragments as floats, so that every element is converted once.
    struct Fragments {
        float2 a[4], b[2];
    } own;
    for (int i = 0; i < 4; ++i) own.a[i] = unpack_bf16x2(a[i]);
    for (int i = 0; i < 2; ++i) own.b[i] = unpack_bf16x2(b[i]);
    auto lanes = emulated::machine().exchange(ALL_LANES, own);
    unsigned lane = emulated::machine().current->lane, row = lane / 4, column = lane % 4 * 2;
    for (unsigned k = 0; k < 4; ++k) {
        const Fragments& left = lanes[row * 4 + k];
        const Fragments &first = lanes[column * 4 + k], &second = lanes[column * 4 + 4 + k];
        for (int half = 0; half < 2; ++half) {
            float2 upper = left.a[2 * half], lower = left.a[2 * half + 1];
            d[0] += upper.x * first.b[half].x + upper.y * first.b[half].y;
            d[1] += upper.x * second.b[half].x + upper.y * second.b[half].y;
            d[2] += lower.x * first.b[half].x + lower.y * first.b[half].y;
            d[3] += lower.x * second.b[half].x + lower.y * second.b[half].y;
        }
    }
}

inline void cp_async_16(SharedAddress shared, const void* global, bool valid) {
    emulated::copy_async(shared, global, 16, valid ? 16 : 0);
}

inline void cp_async_4(SharedAddress shared, const void* global, bool valid) {
    emulated::copy_async(shared, global, 4, valid ? 4 : 0);
}

inline void cp_async_commit() { emulated::copy_async_commit(); }

template <int NEWEST>
void cp_async_wait() {
    emulated::copy_async_wait(NEWEST);
}
