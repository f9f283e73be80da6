// What happens to a rank in the middle of something.
#pragma once

namespace gpudist::doubles {

// Do what was armed, once; false if nothing was.
bool strike();

}  // namespace gpudist::doubles
